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
    assert len(metrics) == 8
    wrong = []
    for each in (each for exported in metrics.values() for each in exported):
        if not re.fullmatch(rf"[A-Z][^.]* \(({UNITS})\)\.", each.sentence):
            wrong.append(f"{each.name}: it is not one sentence with a unit: {each.sentence}")
        if not re.fullmatch(r"sparserow_[a-z_]+", each.name):
            wrong.append(f"{each.name}: a name is sparserow_ and small letters")
        for suffix in ("_seconds", "_bytes"):
            if each.name.endswith(suffix) and f"({suffix[1:]})" not in each.sentence:
                wrong.append(f"{each.name}: its sentence has another unit: {each.sentence}")
    assert not wrong, "\n".join(wrong)


def test_no_name_means_two_things(metrics: dict[str, list[metrics_reference.Exported]]) -> None:
    names = Counter(each.name for exported in metrics.values() for each in exported)
    wrong = sorted(name for name, times in names.items() if times > 1)
    assert not wrong, ", ".join(wrong)
