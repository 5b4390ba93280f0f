"""Measures, judges, writes and shows the figures of all benchmarks.

A figure is the median of at least 50 repetitions after a warm-up. Where it has a reference, measurement and reference
take turns, so that changes of the machine's speed affect both. Inputs are made anew for each repetition, and are not
timed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ...proto.process.whole_file import write_whole

MIN_REPETITIONS = 50


@dataclass(frozen=True)
class Figure:
    """One line of a report.

    Args:
        metric: what was measured, with its size.
        value: the value in ``unit``.
        unit: the unit, such as ``M rows/s``, ``ms`` or ``bytes/row``.
        limit: the limit of ``value``, or of ``ratio`` where that is given; None when the figure is for information.
        ratio: the ratio of ``value`` to its reference in the same run; None when it has none.
        higher_is_better: whether a value passes above its limit, and not below.
    """

    metric: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    higher_is_better: bool = True

    @property
    def passes(self) -> bool | None:
        """Whether the figure meets its limit; None without a limit."""
        if self.limit is None:
            return None
        judged = self.value if self.ratio is None else self.ratio
        return judged >= self.limit if self.higher_is_better else judged <= self.limit


def latency_figure(metric: str, seconds: float, limit: float | None = None, ratio: float | None = None) -> Figure:
    """Returns the figure of a time, shown in microseconds; less is better."""
    return Figure(metric, seconds * 1e6, "us", limit=limit, ratio=ratio, higher_is_better=False)


@dataclass(frozen=True)
class Contender:
    """A piece of work to time: ``run`` is timed on a new result of ``make_input`` each time.

    Args:
        name: the name in progress messages.
        make_input: makes the input; it is not timed.
        run: the work that is timed.
    """

    name: str
    make_input: Callable[[], Any]
    run: Callable[[Any], object]


def time_in_turns(contenders: Sequence[Contender], *, repetitions: int, warm_up: int = 5) -> list[list[float]]:
    """Times contenders in turns, which alternate within a repetition.

    Args:
        contenders: measured in this order in even repetitions, and in reverse order in odd ones.
        repetitions: the number of repetitions that count.
        warm_up: the number of repetitions that run first and do not count.

    Returns:
        The seconds of each repetition, by contender.
    """
    seconds: list[list[float]] = [[] for _ in contenders]
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task(" / ".join(contender.name for contender in contenders), total=warm_up + repetitions)
        for repetition in range(warm_up + repetitions):
            order = range(len(contenders)) if repetition % 2 == 0 else reversed(range(len(contenders)))
            for index in order:
                prepared = contenders[index].make_input()
                begin = time.perf_counter()
                contenders[index].run(prepared)
                elapsed = time.perf_counter() - begin
                if repetition >= warm_up:
                    seconds[index].append(elapsed)
            progress.advance(task)
    return seconds


def median(values: Sequence[float]) -> float:
    """Returns the median of ``values``."""
    return statistics.median(values)


@contextmanager
def pinned_to_one_cpu() -> Iterator[int]:
    """Runs its block on one CPU, which it yields; the CPUs of the process are restored after it."""
    before = os.sched_getaffinity(0)
    cpu = max(before)
    os.sched_setaffinity(0, {cpu})
    try:
        yield cpu
    finally:
        os.sched_setaffinity(0, before)


def resident_bytes(pid: int | None = None) -> int:
    """Returns the resident memory of a process in bytes; None stands for this process."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


_CPU_CLOCK = 2  # the clock of a process's CPU time, as clock_getcpuclockid() computes it


def process_cpu(pid: int) -> float:
    """Returns the CPU seconds of a process, including those of threads that have ended."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


def machine_line() -> str:
    """Returns CPU model, usable CPUs, memory, load and huge-page mode, on which figures depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    total_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    huge_file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = huge_file.read_text().split("[")[1].split("]")[0] if huge_file.exists() else "none"
    return (
        f"{model}, {len(os.sched_getaffinity(0))} CPUs, {total_gib:.0f} GiB, "
        f"load {os.getloadavg()[0]:.1f}, huge pages {huge}, Python {platform.python_version()}"
    )


def write_json(path: Path, figures: Sequence[Figure]) -> None:
    """Writes the figures as ``[{metric, value, unit, limit, ratio, higher_is_better}, ...]``."""
    write_whole(path, json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")


def line_of(figure: Figure) -> str:
    """Returns a line about a figure, for a run that is not over."""
    ratio = "" if figure.ratio is None else f", ratio {figure.ratio:.3f}"
    relation = ">=" if figure.higher_is_better else "<="
    limit = "" if figure.limit is None else f" (limit {relation} {figure.limit:g})"
    return f"{figure.metric}: {figure.value:,.3f} {figure.unit}{ratio}{limit}"


def show(title: str, figures: Sequence[Figure], console: Console) -> None:
    """Prints the figures as a table under a line about the machine."""
    table = Table(title=title, caption=machine_line())
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("ratio", justify="right")
    table.add_column("limit", justify="right")
    for figure in figures:
        relation = ">=" if figure.higher_is_better else "<="
        mark = {True: " [green]ok[/]", False: " [red]missed[/]", None: ""}[figure.passes]
        table.add_row(
            figure.metric,
            f"{figure.value:,.3f}",
            figure.unit,
            "" if figure.ratio is None else f"{figure.ratio:.3f}",
            "" if figure.limit is None else f"{relation} {figure.limit:g}{mark}",
        )
    console.print(table)
