"""``bench all``: runs the benchmarks one after the other, several times in turns, and sums up their figures.

Every run is a process of its own. The file of figures is written after each, and a suite that was interrupted goes on
from it. A later round runs the benchmarks in the reverse order, so that a machine that slows down favours none.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...proto.errors import DataLoss, FailedPrecondition, InvalidArgument
from ...proto.process.whole_file import write_whole
from .harness import Figure, machine_line

FORMAT = "sparserow bench 1"
LONG = ("big_table", "scale", "zoo")  # each takes a good part of an hour
_LAST_LINES = 3
_STOP_SEC = 30.0  # for its servers and folders


@dataclass(frozen=True)
class BenchmarkRun:
    """One run of a benchmark.

    Attributes:
        benchmark: the name of the benchmark.
        round: the number of the round, from 0.
        minutes: the time that it took.
        figures: its figures.
        error: why it has none; "" when it ended well.
    """

    benchmark: str
    round: int
    minutes: float
    figures: list[dict[str, Any]]
    error: str = ""


@dataclass
class Suite:
    """The runs of a suite so far, as its file has them.

    Attributes:
        machine: what the figures depend on: processor, kernel, governor, versions.
        quick: whether the sizes are small.
        runs: the runs so far, in their order.
    """

    machine: dict[str, str]
    quick: bool
    runs: list[BenchmarkRun] = field(default_factory=list)

    def minutes_of(self, benchmark: str) -> float | None:
        """Returns the median of the minutes of a benchmark; None before its first run."""
        minutes = [run.minutes for run in self.runs if run.benchmark == benchmark and not run.error]
        return statistics.median(minutes) if minutes else None

    def has(self, benchmark: str, number: int) -> bool:
        """Returns whether a run of a round has ended well."""
        return any(run.benchmark == benchmark and run.round == number and not run.error for run in self.runs)

    def write(self, path: Path) -> None:
        """Writes the file as a whole, or leaves the one that is there."""
        summary = [asdict(each) for each in summed_up(self.runs)]
        write_whole(path, json.dumps({"format": FORMAT, **asdict(self), "summary": summary}, indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> Suite:
        """Returns the suite of a file.

        Raises:
            DataLoss: the file is not one of a suite.
        """
        try:
            document = json.loads(path.read_text())
            if document["format"] != FORMAT:
                raise ValueError(document["format"])
            runs = [BenchmarkRun(**run) for run in document["runs"]]
            return Suite(dict(document["machine"]), bool(document["quick"]), runs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataLoss(f"{path}: is not a file of `sparserow bench all`: {error!r}") from error


@dataclass(frozen=True)
class Summary:
    """The values of one figure over the runs.

    Attributes:
        benchmark: the benchmark that measured it.
        metric, unit, limit, higher_is_better: as in :class:`Figure`.
        median, least, most: of the values.
        ratio, least_ratio, most_ratio: of the ratios; None without.
        runs: the number of runs.
    """

    benchmark: str
    metric: str
    unit: str
    limit: float | None
    higher_is_better: bool
    median: float
    least: float
    most: float
    ratio: float | None
    least_ratio: float | None
    most_ratio: float | None
    runs: int

    @property
    def figure(self) -> Figure:
        """The figure of the medians."""
        return Figure(self.metric, self.median, self.unit, self.limit, self.ratio, self.higher_is_better)

    @property
    def spread(self) -> float:
        """The difference of the extremes relative to the median, of the ratio where there is one."""
        least, middle, most = (
            (self.least, self.median, self.most)
            if self.ratio is None or self.least_ratio is None or self.most_ratio is None
            else (self.least_ratio, self.ratio, self.most_ratio)
        )
        return (most - least) / abs(middle) if middle else 0.0


def summed_up(runs: Sequence[BenchmarkRun]) -> list[Summary]:
    """Returns the figures of runs, in the order of their first occurrence."""
    by_metric: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for figure in run.figures:
            by_metric.setdefault((run.benchmark, figure["metric"]), []).append(figure)
    out = []
    for (benchmark, metric), figures in by_metric.items():
        values = [figure["value"] for figure in figures]
        ratios = [figure["ratio"] for figure in figures if figure["ratio"] is not None]
        last = figures[-1]
        out.append(
            Summary(
                benchmark,
                metric,
                last["unit"],
                last["limit"],
                last["higher_is_better"],
                statistics.median(values),
                min(values),
                max(values),
                statistics.median(ratios) if ratios else None,
                min(ratios, default=None),
                max(ratios, default=None),
                len(figures),
            )
        )
    return out


def machine() -> dict[str, str]:
    """Returns what figures depend on, without what changes from run to run."""
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "processor": machine_line().split(", load", 1)[0],
        "kernel": platform.release(),
        "governor": governor.read_text().strip() if governor.exists() else "not named by the kernel",
        "python": platform.python_version(),
        "torch": version("torch"),
        "sparserow": version("sparserow"),
    }


def open_suite(path: Path | None, *, quick: bool) -> Suite:
    """Returns the suite to go on with: that of the file where there is one, else a new one.

    Raises:
        DataLoss: the file is not one of a suite.
        FailedPrecondition: it has figures of another machine, of other versions, or of other sizes.
    """
    here = machine()
    if path is None or not path.exists():
        return Suite(here, quick)
    suite = Suite.read(path)
    for name, value in here.items():
        if suite.machine.get(name) != value:
            raise FailedPrecondition(
                f"--json {path}: has figures of {name} {suite.machine.get(name)!r}, and here it is {value!r}; give "
                "another file"
            )
    if suite.quick != quick:
        raise FailedPrecondition(
            f"--json {path}: has figures of {'small' if suite.quick else 'full'} sizes; give another file, or "
            f"{'add' if suite.quick else 'leave out'} --quick"
        )
    return suite


def check_names(only: str, known: Sequence[str]) -> list[str]:
    """Returns the benchmarks of ``--only``.

    Raises:
        InvalidArgument: there is none of that name.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None or not names:
        raise InvalidArgument(f"--only: {wrong or only!r} is no benchmark; allowed: {', '.join(known)}")
    return names


def left_of(suite: Suite, names: Sequence[str], rounds: int) -> list[tuple[str, int]]:
    """Returns the runs that are left, in their order: (benchmark, number of the round)."""
    order = [(name, number) for number in range(rounds) for name in (names if number % 2 == 0 else names[::-1])]
    return [(name, number) for name, number in order if not suite.has(name, number)]


def expected(suite: Suite, left: Sequence[tuple[str, int]]) -> str:
    """Returns a line about the time that the runs will take, as far as earlier runs show."""
    minutes = [suite.minutes_of(name) for name, _ in left]
    known = sum(each for each in minutes if each is not None)
    unknown = sorted({name for (name, _), each in zip(left, minutes, strict=True) if each is None})
    line = f"{len(left)} runs are left: {known:.0f} minutes"
    return f"{line}, and those of {', '.join(unknown)}, which have not run here" if unknown else line


def run_suite(
    suite: Suite,
    left: Sequence[tuple[str, int]],
    path: Path | None,
    *,
    run: Callable[[str, bool], BenchmarkRun] | None = None,
) -> Iterator[BenchmarkRun]:
    """Runs what is left, and yields each run after its figures are in the file.

    Args:
        suite: the suite, which is extended.
        left: the runs, see :func:`left_of`.
        path: the file of the suite; None: there is none.
        run: runs a benchmark, with small sizes or not; None: :func:`run_process`.
    """
    for name, number in left:
        made = (run or run_process)(name, suite.quick)
        suite.runs.append(BenchmarkRun(name, number, made.minutes, made.figures, made.error))
        if path is not None:
            suite.write(path)
        yield suite.runs[-1]


def run_process(name: str, quick: bool) -> BenchmarkRun:
    """Runs a benchmark in a process of its own; how it fails is in the result."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        words = [sys.executable, "-m", "sparserow.deploy.cli", "bench", name, "--json", str(path)]
        code, stderr = _ended([*words, *(["--quick"] if quick else [])])
        minutes = (time.monotonic() - began) / 60
        if code != 0:
            lines = [line.strip() for line in stderr.splitlines() if line.strip()]
            return BenchmarkRun(name, 0, minutes, [], " | ".join(lines[-_LAST_LINES:]) or f"exit status {code}")
        return BenchmarkRun(name, 0, minutes, json.loads(path.read_text()))


def _ended(words: Sequence[str]) -> tuple[int, str]:
    """Runs a command; returns its exit status and stderr. An interruption ends the command, which gets time for it."""
    with subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "NO_COLOR": "1"},
    ) as process:
        try:
            _, stderr = process.communicate()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SEC)
            process.kill()
            raise
        return process.returncode, stderr


def show_summary(title: str, summary: Sequence[Summary], console: Console) -> None:
    """Prints the figures of a suite as a table: medians, and how far the runs are apart."""
    table = Table(title=title)
    for name in ("metric", "median", "unit", "ratio", "spread", "runs", "limit"):
        table.add_column(name, justify="left" if name in ("metric", "unit") else "right")
    for each in summary:
        mark = {True: " [green]ok[/]", False: " [red]missed[/]", None: ""}[each.figure.passes]
        relation = ">=" if each.higher_is_better else "<="
        table.add_row(
            f"{each.benchmark}: {each.metric}",
            f"{each.median:,.3f}",
            each.unit,
            "" if each.ratio is None else f"{each.ratio:.3f}",
            f"{each.spread:.0%}",
            str(each.runs),
            "" if each.limit is None else f"{relation} {each.limit:g}{mark}",
        )
    console.print(table)
