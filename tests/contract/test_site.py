"""The site of the documents (``make docs``): its pages, its links, and the public names."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import sparserow
from rooms import ROOT
from sparserow.deploy.reference.pictures import FOLDER, PICTURES
from sparserow.deploy.reference.site_pages import api_page, site_links

GENERATED = {"index.md", "architecture.md", "api.md"}


def pages_of(nav: Any) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    return set().union(*(pages_of(part) for part in (nav.values() if isinstance(nav, dict) else nav)))


def test_every_page_has_its_place() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]) == pages | GENERATED


def test_every_public_name_is_there() -> None:
    text = api_page((ROOT / "__init__.pyi").read_text())
    shown = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert shown == set(sparserow.__all__)


@pytest.mark.parametrize(
    ("text", "folder", "expected"),
    [
        ("[Serving](docs/serving.md#x)", "", "[Serving](serving.md#x)"),
        ("[plan](../plan.md)", "docs/measurements", "[plan](../plan.md)"),
        ("[it](../ARCHITECTURE.md)", "docs", "[it](architecture.md)"),
        ("[alerts](../deploy/monitoring/alerts.yaml)", "docs", "alerts (`deploy/monitoring/alerts.yaml`)"),
        ("[`LICENSE`](LICENSE)", "", "`LICENSE`"),
        ("[a](https://example.org/a)", "docs", "[a](https://example.org/a)"),
        ("[gone](docs/gone.md)", "", "[gone](docs/gone.md)"),
        ("[here](#part)", "docs", "[here](#part)"),
    ],
)
def test_links_lead_somewhere_or_are_names(text: str, folder: str, expected: str) -> None:
    assert site_links(text, ROOT / folder) == expected


def test_pictures_are_those_that_the_script_draws() -> None:
    wrong = []
    for name, draw in sorted(PICTURES.items()):
        text = draw().svg()
        try:
            is_svg = ElementTree.fromstring(text).tag.endswith("svg")
        except ElementTree.ParseError:
            is_svg = False
        if not is_svg:
            wrong.append(f"{name} is drawn as something that is no SVG")
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text:
            wrong.append(f"{name} differs; run: python -m sparserow.deploy.reference.pictures")
    assert PICTURES
    assert not wrong, "\n".join(wrong)


def test_pictures_that_documents_name_are_there_and_small() -> None:
    named, wrong = set(), []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for description, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            path = (page.parent / target).resolve()
            named.add(path.name)
            if not description.strip():
                wrong.append(f"{page.name}: {target} has no description")
            if not path.is_file():
                wrong.append(f"{page.name}: {target} does not exist")
            elif path.suffix == ".png":
                data = path.read_bytes()
                if not data.startswith(b"\x89PNG\r\n\x1a\n") or len(data) > 150_000:
                    wrong.append(f"{page.name}: {target} is no PNG of at most 150,000 bytes")
    assert {path.name for path in FOLDER.iterdir()} == named, "a picture that no document shows"
    assert not wrong, "\n".join(wrong)


def test_a_page_opens_with_three_quick_facts() -> None:
    wrong = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.stem in {"configuration", "errors", "metrics", "faq"}:
            continue  # of lists to look things up in
        opening = page.read_text().partition("\n## ")[0]
        facts = [line for line in opening.splitlines() if line.startswith("- ")]
        if len(facts) != 3:
            wrong.append(f"docs/{page.name} opens with {len(facts)} facts")
    assert not wrong, "\n".join(wrong)
