"""docs/metrics.md and docs/errors.md are what the code says; each metric is one sentence with a unit."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from sparserow.deploy.reference import errors_reference, metrics_reference

UNITS = "count|bytes|seconds|steps|number|nats|probability|0 or 1|0 to 1"


@pytest.fixture(scope="module")
def metrics() -> dict[str, list[metrics_reference.Exported]]:
    return metrics_reference.all_metrics()


def test_the_pages_are_up_to_date() -> None:
    written = metrics_reference.PAGE.read_text(encoding="utf-8")
    assert written == metrics_reference.render(), "run: python -m sparserow.deploy.reference.metrics_reference"
    page = errors_reference.PAGE.read_text(encoding="utf-8")
    assert page == errors_reference.render(page), "run: python -m sparserow.deploy.reference.errors_reference"


def test_each_metric_is_one_sentence_with_a_unit(metrics: dict[str, list[metrics_reference.Exported]]) -> None:
    assert len(metrics) == 7
    for each in (each for exported in metrics.values() for each in exported):
        assert re.fullmatch(rf"[A-Z][^.]* \(({UNITS})\)\.", each.sentence), each
        assert re.fullmatch(r"sparserow_[a-z_]+", each.name), each
        for suffix in ("_seconds", "_bytes"):
            assert not each.name.endswith(suffix) or f"({suffix[1:]})" in each.sentence, each


def test_no_name_means_two_things(metrics: dict[str, list[metrics_reference.Exported]]) -> None:
    names = Counter(each.name for exported in metrics.values() for each in exported)
    assert {name for name, times in names.items() if times > 1} == set()
