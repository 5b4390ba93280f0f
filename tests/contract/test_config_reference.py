"""docs/configuration.md is what the schema says."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from sparserow.deploy.reference.config_reference import PAGE, render
from sparserow.proto.config.allowed import sections_of
from sparserow.proto.config.job import JobConfig


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m sparserow.deploy.reference.config_reference"


def test_its_links_lead_somewhere() -> None:
    page = render()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#([^)]*)\)", page))
    assert links
    assert links <= anchors


def all_sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    inner = {part for field in section.model_fields.values() for part in sections_of(field.annotation)}
    return {section}.union(*map(all_sections, inner))


@pytest.mark.parametrize("section", sorted(all_sections(JobConfig), key=lambda s: s.__name__), ids=lambda s: s.__name__)
def test_every_option_is_described(section: type[BaseModel]) -> None:
    assert section.model_config.get("extra") == "forbid"
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no description"
