"""What ``bench peers`` writes: figures as other benchmarks have them, and a page with one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version

import numpy as np

from .harness import Figure, median
from .peer_contests import CONTESTS, Contest
from .peers.pins import PEERS
from .peers_run import PeerResult, PeersReport

_QUIET_LOAD = 0.5
_NONE = ""


def peer_figures(report: PeersReport) -> list[Figure]:
    """Returns the figures of a report: for each work this project, raw TCP, the peers, and the ratio to each peer."""
    figures: list[Figure] = []
    for contest, kind, dim in _works(report):
        keys = contest.keys(report.size)
        name = f"{contest.title}: {contest.works[kind].split(':')[0]} {keys} x {dim}"
        place = (contest.title, kind, dim)
        figures.append(Figure(name, _rate(keys, report.ours[place]), "M rows/s"))
        if place in report.limits:
            figures.append(Figure(f"{name}: raw TCP, same bytes", _rate(keys, report.limits[place]), "M rows/s"))
        for result in _results(report, contest, kind, dim):
            theirs, ours = _rate(keys, result.seconds), _rate(keys, result.beside)
            title = result.peer.title
            figures.append(Figure(f"{name}: {title}", theirs, "M rows/s"))
            figures.append(Figure(f"{name}: of {title}", ours, "M rows/s", _goal(report, result), ours / theirs))
            if kind == "lookup":
                figures += [
                    Figure(f"{name}: p99, {who}", _p99_ms(seconds), "ms", higher_is_better=False)
                    for who, seconds in (("this project", result.beside), (title, result.seconds))
                ]
    return figures


def page_of(report: PeersReport) -> str:
    """Returns a page in Markdown: how it was measured, one table, and the versions."""
    size = report.size
    repetitions = size.rounds * size.repetitions
    busy = (
        f"**The machine was not quiet**: its load was {report.load:.1f} before the run. Rates are lower than on a "
        "quiet one, and ratios are coarser."
        if report.load > _QUIET_LOAD
        else f"The machine was quiet: its load was {report.load:.1f} before the run."
    )
    lines = [
        "# Peers: what was measured",
        "",
        "<!-- Written by `sparserow bench peers --write`; what is changed by hand is lost. -->",
        "",
        f"`sparserow bench peers{'' if size.is_judged else ' --quick'}`, {date.today().isoformat()}: {report.machine}.",
        busy,
        *([] if size.is_judged else ["The sizes are small, to see that it works; the figures are not comparable."]),
        "",
        f"Tables have {size.rows:,} rows, batches {size.keys:,} unique random keys, drawn before the clock runs.",
        f"Lookups of a served model ask for {size.served_keys:,} of {size.served_rows:,} keys.",
        "Server and client are processes of this machine, and talk over loopback.",
        f"Each figure is the median of {repetitions} or more repetitions in {size.rounds} rounds, in M rows/s.",
        "In each round this project is timed right beside each peer, by the same clock.",
        "The ratio is this project's rate beside the peer to the peer's rate, by dim; `missed` is one below its goal.",
        "",
        *_table(report),
        "",
        "## Versions",
        "",
        "| peer | versions | from |",
        "|---|---|---|",
        f"| this project | sparserow {version('sparserow')}, torch {version('torch')} | |",
        *_version_lines(report),
        "",
    ]
    return "\n".join(lines)


def _table(report: PeersReport) -> Iterator[str]:
    dims = sorted({*report.size.dims, *report.size.served_dims}, reverse=True)
    yield "| work | system | its rows | " + " | ".join(f"dim {dim}" for dim in dims) + " | ratio | not comparable |"
    yield "|---|---|---|" + "---:|" * (len(dims) + 1) + "---|"
    for contest in CONTESTS:
        for kind, work in contest.works.items():
            found = [dim for each, one, dim in _works(report) if each is contest and one == kind]
            if found:
                yield from _rows_of_work(report, contest, kind, f"{work} ({contest.title})", dims)
    absent = [(name, "all", error.reason) for name, error in report.skipped.items()]
    absent += [(name, contest, error.reason) for (name, contest), error in report.failed.items()]
    for peer in PEERS:
        for name, works, reason in absent:
            if name == peer.name:
                empty = " | ".join("" for _ in dims)
                yield f"| not measured ({works}) | {peer.title} | {peer.rows} | {empty} | | {_cell(reason)} |"


def _rows_of_work(report: PeersReport, contest: Contest, kind: str, work: str, dims: Sequence[int]) -> Iterator[str]:
    keys = contest.keys(report.size)

    def rates(seconds: dict[int, list[float]]) -> str:
        return " | ".join(f"{_rate(keys, seconds[dim]):.2f}" if seconds.get(dim) else "" for dim in dims)

    ours = {dim: report.ours.get((contest.title, kind, dim), []) for dim in dims}
    yield f"| {work} | **this project** | hash | {rates(ours)} | | {_p99(kind, ours)} |"
    limits = {dim: report.limits.get((contest.title, kind, dim), []) for dim in dims}
    if any(limits.values()):
        yield f"| | raw TCP, same bytes | | {rates(limits)} | | |"
    by_peer: dict[str, dict[int, PeerResult]] = {}
    for dim in dims:
        for result in _results(report, contest, kind, dim):
            by_peer.setdefault(result.peer.name, {})[dim] = result
    for results in by_peer.values():
        peer = next(iter(results.values())).peer
        seconds = {dim: result.seconds for dim, result in results.items()}
        ratios = ", ".join(_ratio(report, result) for result in results.values())
        beside = " ".join(text for key in ("", kind) if (text := peer.beside.get(key)))
        notes = " ".join(part for part in (_p99(kind, seconds), beside) if part)
        yield f"| | {peer.title} | {peer.rows} | {rates(seconds)} | {ratios} | {_cell(notes)} |"


def _goal(report: PeersReport, result: PeerResult) -> float | None:
    """Returns the least ratio to a peer; None: there is no goal."""
    return result.peer.goals.get(result.kind) if report.size.is_judged else None


def _ratio(report: PeersReport, result: PeerResult) -> str:
    ratio, goal = median(result.seconds) / median(result.beside), _goal(report, result)
    return f"{ratio:.2f}" + (" missed" if goal is not None and ratio < goal else "")


def _p99(kind: str, seconds: dict[int, list[float]]) -> str:
    found = [each for each in seconds.values() if each]
    if kind != "lookup" or not found:
        return _NONE
    return f"p50 {median(found[0]) * 1e3:.2f} ms, p99 {_p99_ms(found[0]):.2f} ms."


def _p99_ms(seconds: Sequence[float]) -> float:
    return float(np.percentile(seconds, 99)) * 1e3


def _version_lines(report: PeersReport) -> Iterator[str]:
    for peer in PEERS:
        if peer.name in report.versions:
            versions = ", ".join(f"{name} {value}" for name, value in report.versions[peer.name].items())
            yield f"| {peer.title} | {versions} | {peer.origin} |"


def _works(report: PeersReport) -> Iterator[tuple[Contest, str, int]]:
    """Yields each work that this project was measured at beside a peer, in the order of the contests."""
    for contest in CONTESTS:
        for kind in contest.works:
            for dim in contest.dims(report.size):
                if _results(report, contest, kind, dim):
                    yield contest, kind, dim


def _results(report: PeersReport, contest: Contest, kind: str, dim: int) -> list[PeerResult]:
    return [
        result
        for result in report.results
        if (result.contest.title, result.kind, result.dim) == (contest.title, kind, dim)
    ]


def _rate(keys: int, seconds: Sequence[float]) -> float:
    """Returns M rows/s."""
    return keys / median(seconds) / 1e6


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
