"""Reads the lines of a run (``metrics.file``) as curves, which run_page.py draws."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...proto.errors import DataLoss, InvalidArgument, NotFound

_MOST_BYTES = 1 << 30
_KINDS = ("run", "resumed", "progress", "window", "test", "epoch")
_TESTS = ("test", "epoch")  # in the order in which they are written at one place


@dataclass
class Curve:
    """A curve over the samples of a run.

    Attributes:
        samples: the samples of all workers up to each point.
        values: the value at each point.
    """

    samples: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, samples: int, value: Any) -> None:
        """Adds a point; a value that is no number is left out."""
        if isinstance(value, int | float):
            self.samples.append(samples)
            self.values.append(float(value))


@dataclass(frozen=True)
class Run:
    """The curves of a run.

    Attributes:
        job: the name of the job.
        charts: the curves of each chart, by the title of the chart and the name of the curve.
    """

    job: str
    charts: Mapping[str, Mapping[str, Curve]]


def read_run(path: Path) -> Run:
    """Reads the lines of a run. Where an epoch was begun again, the later lines of it count.

    Args:
        path: the file.

    Raises:
        NotFound: the file does not exist.
        InvalidArgument: the file is too large, or has no epoch and no progress.
        DataLoss: a line is no entry of a run; the text has its number.
    """
    if not path.is_file():
        raise NotFound(f"{path}: there is no such file")
    if path.stat().st_size > _MOST_BYTES:
        raise InvalidArgument(f"{path}: has {path.stat().st_size} bytes; allowed: {_MOST_BYTES}")
    job = ""
    former: list[dict[str, Any]] = []  # of the processes before the present one
    entries: list[dict[str, Any]] = []
    sizes: dict[int, int] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            entry = _entry(line, path, number)
            if entry["kind"] == "run":
                job = str(entry.get("job", ""))
                former, entries = former + entries, []
            elif entry["kind"] == "resumed":
                sizes.update((epoch, samples) for epoch, samples in entry["epochs"])
            else:
                if not entries:
                    former = _before(former, entry)
                entries.append(entry)
    entries = former + entries
    if not entries:
        raise InvalidArgument(f"{path}: has no progress and no epoch yet")
    return Run(job, _charts(entries, sizes))


def _entry(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict) or entry["kind"] not in _KINDS:
            raise ValueError("it is no entry of a run")
        if entry["kind"] == "resumed":
            entry["epochs"] = [(int(epoch), int(samples)) for epoch, samples in entry["epochs"]]
        elif entry["kind"] != "run":
            int(entry["epoch"]), int(entry["samples"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLoss(f"{path}, line {number}: {error}; expected the lines that metrics.file writes") from None
    return entry


def _before(former: list[dict[str, Any]], first: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what came before the place where a process goes on, by the first entry that it wrote.

    Only entries of former processes are removed, because progress is an estimate, which may lie before a window that
    was written. An evaluation that is made again leaves the windows at its place, which are not written again.
    """
    place, kind = (first["epoch"], first["samples"]), first["kind"]
    again = _TESTS[_TESTS.index(kind) :] if kind in _TESTS else None

    def is_before(entry: dict[str, Any]) -> bool:
        there = (entry["epoch"], entry["samples"])
        return there < place or (there == place and again is not None and entry["kind"] not in again)

    return [entry for entry in former if is_before(entry)]


def _charts(entries: list[dict[str, Any]], known: Mapping[int, int]) -> dict[str, dict[str, Curve]]:
    charts: dict[str, dict[str, Curve]] = {}
    sizes = {**known} | {entry["epoch"]: entry["samples"] for entry in entries if entry["kind"] == "epoch"}
    for entry in entries:
        before = sum(samples for epoch, samples in sizes.items() if epoch < entry["epoch"])
        at = before + entry["samples"]

        def add(chart: str, curve: str, value: Any, at: int = at) -> None:
            charts.setdefault(chart, {}).setdefault(curve, Curve()).add(at, value)

        if entry["kind"] == "progress":
            add("loss", "recent samples", entry.get("loss"))
            add("auc", "recent samples", entry.get("auc"))
            continue
        if entry["kind"] == "epoch":
            add("loss", "epoch", entry.get("train_loss"))
            add("samples per second", "epoch", entry.get("samples_per_sec"))
        for name, value in (entry.get("metrics") or {}).items():
            if "[" in name:  # of a bucket
                continue
            task, _, metric = name.rpartition(".")
            add(metric, f"test {task}" if entry["kind"] in _TESTS else "progressive", value)
    return charts
