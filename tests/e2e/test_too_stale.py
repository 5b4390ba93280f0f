"""The example of a bound that is too large shows what it says."""

from __future__ import annotations

from sparserow.deploy.examples.too_stale import compare


def test_a_small_bound_is_harmless_and_a_far_too_large_one_is_not():
    auc = compare([0, 2, 32], steps=400)
    assert abs(auc[0] - auc[2]) < 0.005, auc
    assert auc[0] - auc[32] > 0.03, auc
