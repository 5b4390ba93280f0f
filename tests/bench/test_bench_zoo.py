"""``bench zoo``: models that train on servers by their job files have the metrics that they have in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparserow.deploy.bench import zoo


def test_the_quick_form_compares_servers_with_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "CASES", [case for case in zoo.CASES if case.job in ("mmoe", "two_tower")])
    figures = {figure.metric: figure for figure in zoo.run_zoo(replace(zoo.QUICK, rows=1_000))}
    for name in ("mmoe: click.auc", "mmoe: buy.auc", "two_tower: HR@10 over all items"):
        ours, theirs = (figures[f"{name} {place}"].value for place in ("on servers", "in plain torch"))
        assert ours == pytest.approx(theirs, abs=2e-3)
        assert figures[f"{name}, difference"].value == pytest.approx(abs(ours - theirs))
    assert figures["mmoe: click.auc, difference"].limit == zoo.LIMIT_OF_AUC
    assert 0.25 < figures["two_tower: HR@10 over all items on servers"].value < 1, "chance is 10 of 40 items"
    assert 0.7 < figures["zoo: best possible AUC of clicks"].value < 0.9
