"""Mean and deviation of a column against exact arithmetic, for constants, near-constants and any cut into batches."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

import sparserow as sr
from sparserow.proto.features.statistics import Moments

VALUES = st.floats(-1e100, 1e100, allow_nan=False, allow_infinity=False)
CUTS = st.lists(st.integers(1, 5_000), min_size=1, max_size=40)


def moments_of(values: np.ndarray, cuts: list[int]) -> tuple[float, float]:
    moments = Moments()
    for part in np.split(values, np.cumsum(cuts)[:-1]):
        moments.add(part)
    return moments.pair


@given(VALUES, CUTS)
def test_a_constant_has_the_deviation_1(value: float, cuts: list[int]) -> None:
    mean, deviation = moments_of(np.full(sum(cuts), value), cuts)
    assert deviation == 1.0
    assert mean == pytest.approx(value, rel=1e-14, abs=0)


@pytest.mark.parametrize("value", [0.1, 36.6, math.log1p(3.0), -1 / 3])
def test_a_constant_of_very_many_batches_has_the_deviation_1(value: float) -> None:
    assert moments_of(np.full(100_000, value), [5] * 20_000)[1] == 1.0


@given(st.floats(0.1, 1e6), st.floats(1e-11, 1.0), CUTS)
def test_a_near_constant_has_its_own_deviation(value: float, step: float, cuts: list[int]) -> None:
    values = value + step * value * (np.arange(sum(cuts) + 1) % 2)
    mean, deviation = moments_of(values, [*cuts, 1])
    exact = [Fraction(each) for each in (values[0], values[1])]
    counts = [len(values) - len(values) // 2, len(values) // 2]
    center = sum(each * count for each, count in zip(exact, counts, strict=True)) / len(values)
    square = sum((each - center) ** 2 * count for each, count in zip(exact, counts, strict=True)) / len(values)
    assert mean == pytest.approx(float(center), rel=1e-12)
    assert deviation == pytest.approx(math.sqrt(square), rel=1e-3)


def test_a_constant_column_stays_in_bounds_when_it_changes_later() -> None:
    features = sr.features.Features([sr.features.NumericFeature("x", scale="standardize")]).fit(
        [{"x": [36.6] * 65_536}]
    )
    found = features({"x": [36.6, 37.0]})["x"].flatten().tolist()
    assert found == pytest.approx([0.0, 0.4], abs=1e-5)
