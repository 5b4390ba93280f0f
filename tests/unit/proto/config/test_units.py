"""Sizes and durations in words."""

from __future__ import annotations

import pytest

from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.units import format_bytes, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 * 2**30), ("1.5 KiB", 1536), (7, 7), ("7", 7), ("7B", 7), ("2MB", 2_000_000), ("0", 0), (1e3, 1000)],
)
def test_bytes(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["8Gib", "-1", -1, "", "GiB", "1.5B", 0.5, True, None, "1 2", float("nan")])
def test_no_bytes(text: object) -> None:
    with pytest.raises(InvalidArgument, match="allowed: "):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "seconds"), [("250ms", 0.25), ("10", 10), (0.5, 0.5), ("5min", 300), ("1h", 3600)])
def test_seconds(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["5m", "-1s", False, [], "1e3"])
def test_no_seconds(text: object) -> None:
    with pytest.raises(InvalidArgument, match="such as"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB"), (2**51, "2048.0 TiB")]
)
def test_shown_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
