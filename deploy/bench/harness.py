"""What every benchmark shares: how a figure is measured, judged, written and shown.

A figure is the median of at least 50 repetitions after a warm-up. Where it has a reference, measurement and
reference take turns, so that a change of the machine's mood meets both. Inputs are made anew for each repetition,
outside of the clock.
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

MIN_REPETITIONS = 50


@dataclass(frozen=True)
class Figure:
    """One line of a report.

    Args:
        metric: what was measured, with its size.
        value: in ``unit``.
        unit: ``M rows/s``, ``ms``, ``bytes/row`` ...
        limit: what ``value`` (or ``ratio``, where it is given) must reach; None when it is for information.
        ratio: of ``value`` to its reference of the same run; None when it has none.
        higher_is_better: which side of the limit is the good one.
    """

    metric: str
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None
    higher_is_better: bool = True

    @property
    def passes(self) -> bool | None:
        """Whether the limit is met; None without a limit."""
        if self.limit is None:
            return None
        judged = self.value if self.ratio is None else self.ratio
        return judged >= self.limit if self.higher_is_better else judged <= self.limit


def latency_figure(metric: str, seconds: float, limit: float | None = None, ratio: float | None = None) -> Figure:
    """A time, shown in microseconds; less is better."""
    return Figure(metric, seconds * 1e6, "us", limit=limit, ratio=ratio, higher_is_better=False)


@dataclass(frozen=True)
class Contender:
    """Something to time: ``run`` is timed on what ``make_input`` gives, anew each time.

    Args:
        name: for progress.
        make_input: not timed.
        run: timed.
    """

    name: str
    make_input: Callable[[], Any]
    run: Callable[[Any], object]


def time_in_turns(contenders: Sequence[Contender], *, repetitions: int, warm_up: int = 5) -> list[list[float]]:
    """Seconds of each repetition of each contender; contenders take turns within a repetition.

    Args:
        contenders: measured in this order in even repetitions and in the reverse order in odd ones.
        repetitions: kept ones.
        warm_up: repetitions that are run first and dropped.

    Returns:
        One list of ``repetitions`` seconds per contender.
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
    """Median of ``values``."""
    return statistics.median(values)


@contextmanager
def pinned_to_one_cpu() -> Iterator[int]:
    """Runs its body on one CPU, which it yields; the process's CPUs are restored after it."""
    before = os.sched_getaffinity(0)
    cpu = max(before)
    os.sched_setaffinity(0, {cpu})
    try:
        yield cpu
    finally:
        os.sched_setaffinity(0, before)


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of a process; None: of this one."""
    pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


_CPU_CLOCK = 2  # of a process, by the scheduler: what clock_getcpuclockid() makes of a process id


def process_cpu(pid: int) -> float:
    """Seconds of CPU that a process has had, with those of threads that have ended."""
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


def machine_line() -> str:
    """CPU model, usable CPUs, memory, load and huge-page mode: what a figure depends on."""
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
    """Writes ``[{metric, value, unit, limit, ratio}, ...]``."""
    keys = ("metric", "value", "unit", "limit", "ratio")
    rows = [{key: value for key, value in asdict(figure).items() if key in keys} for figure in figures]
    path.write_text(json.dumps(rows, indent=2) + "\n")


def line_of(figure: Figure) -> str:
    """A figure of a run that is not over."""
    ratio = "" if figure.ratio is None else f", ratio {figure.ratio:.3f}"
    relation = ">=" if figure.higher_is_better else "<="
    limit = "" if figure.limit is None else f" (limit {relation} {figure.limit:g})"
    return f"{figure.metric}: {figure.value:,.3f} {figure.unit}{ratio}{limit}"


def show(title: str, figures: Sequence[Figure], console: Console) -> None:
    """Prints the figures as a table under the machine they were taken on."""
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
