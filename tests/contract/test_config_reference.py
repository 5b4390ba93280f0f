"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import re

from pydantic import BaseModel

from sparserow.deploy.reference.config_reference import PAGE, render
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.allowed import sections_of


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m sparserow.deploy.reference.config_reference"


def test_its_links_lead_somewhere() -> None:
    page = render()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#([^)]*)\)", page))
    assert links
    assert not links - anchors, f"links that lead nowhere: {', '.join(sorted(links - anchors))}"


def all_sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    inner = {part for field in section.model_fields.values() for part in sections_of(field.annotation)}
    return {section}.union(*map(all_sections, inner))


def test_every_option_is_described() -> None:
    sections = sorted(all_sections(JobConfig), key=lambda section: section.__name__)
    assert len(sections) > 30
    wrong = [f"{each.__name__} takes unknown keys" for each in sections if each.model_config.get("extra") != "forbid"]
    wrong += [
        f"{section.__name__}.{name} has no description"
        for section in sections
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not wrong, "\n".join(wrong)
