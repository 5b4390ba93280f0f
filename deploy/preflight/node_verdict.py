"""Decides from the reports of all nodes which of them are broken or slow; it measures nothing and knows no clock.

Nodes stand in a ring, and each exchanges data with both of its neighbours. So a node whose exchange fails on one side
alone is a witness against its neighbour on that side. The three kinds of evidence, from the strongest:

1. A node that does not report, or that reports a failure of its own, is broken.
2. A node is *reached* when one of its exchanges succeeded. A failed exchange between a reached node and one that is not
   reached says that the second is broken. Between two reached nodes, their link is broken, and one end has to go.
3. All other nodes without a successful exchange are *unproven*: their neighbours may be the ones at fault.
   :func:`next_ring` names another ring for these. When there is none left, they count as broken.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["ok", "slow", "broken", "unproven"]

# Seconds by which a part must exceed the median to count as slow, as machines differ by less without a fault.
NOISE_SEC = {"matrices": 0.0, "exchange": 0.1, "disk": 1.0}
_MOST_RINGS = 3


@dataclass(frozen=True)
class Exchange:
    """One exchange of data of a node.

    Attributes:
        peer: the index of the other node.
        seconds: the time that the data took both ways, in seconds; None when the exchange failed.
        problem: why it failed; "" when it succeeded.
    """

    peer: int
    seconds: float | None
    problem: str = ""


@dataclass(frozen=True)
class NodeReport:
    """What a node found about itself.

    Attributes:
        index: the index of the node, from 0.
        matrices_sec: the time of a matrix product on its slowest device, in seconds; None when that part failed.
        disk_sec: the time for writing and reading the file, in seconds; None when that part failed.
        exchanges: its exchanges, in all rings so far.
        problems: the failures of its own parts, as sentences.
    """

    index: int
    matrices_sec: float | None = None
    disk_sec: float | None = None
    exchanges: tuple[Exchange, ...] = ()
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> NodeReport:
        """Returns the report that ``dataclasses.asdict`` made a mapping of."""
        exchanges = tuple(Exchange(**each) for each in values["exchanges"])
        return cls(**{**values, "exchanges": exchanges, "problems": tuple(values["problems"])})

    def joined(self, later: NodeReport) -> NodeReport:
        """Returns this report with the exchanges of a later ring, in which nothing else is measured."""
        return NodeReport(
            self.index,
            self.matrices_sec,
            self.disk_sec,
            (*self.exchanges, *later.exchanges),
            (*self.problems, *later.problems),
        )

    @property
    def exchange_sec(self) -> float | None:
        """The time of its fastest exchange, since a slow neighbour slows one side alone; None without a success."""
        return min((each.seconds for each in self.exchanges if each.seconds is not None), default=None)

    def seconds(self) -> dict[str, float | None]:
        """Returns the time of each part, by the names of ``NOISE_SEC``."""
        return {"matrices": self.matrices_sec, "exchange": self.exchange_sec, "disk": self.disk_sec}


@dataclass(frozen=True)
class NodeResult:
    """What the check found about a node.

    Attributes:
        index: the index of the node.
        name: its name, for people.
        state: "ok", "slow", "broken", or "unproven" while another ring may show more.
        reasons: why it is not "ok", as sentences without a full stop.
        seconds: the time of each part in seconds; None for a part that failed.
    """

    index: int
    name: str
    state: State
    reasons: tuple[str, ...]
    seconds: dict[str, float | None]


@dataclass(frozen=True)
class Verdict:
    """The results of all nodes, in the order of their indexes."""

    nodes: tuple[NodeResult, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Verdict:
        """Returns the verdict that ``dataclasses.asdict`` made a mapping of."""
        return cls(tuple(NodeResult(**{**each, "reasons": tuple(each["reasons"])}) for each in values["nodes"]))

    @property
    def bad(self) -> tuple[int, ...]:
        """The indexes of the nodes that are not "ok"."""
        return tuple(node.index for node in self.nodes if node.state != "ok")

    def with_state(self, state: State) -> tuple[int, ...]:
        """Returns the indexes of the nodes in a state."""
        return tuple(node.index for node in self.nodes if node.state == state)

    def sentence(self) -> str:
        """Returns one line that names each bad node and why it is bad; "" when there is none."""
        clauses = [f"{node.name} is {node.state}: {', and '.join(node.reasons)}" for node in self.nodes if node.reasons]
        return "; ".join(clauses)


def add_report(reports: dict[int, NodeReport], index: int, values: Mapping[str, Any] | None) -> None:
    """Adds what a node reported about a ring to what it reported before.

    Args:
        reports: the reports of all nodes, by index; a node that is silent in one ring has none from then on.
        index: the index of the node.
        values: the report, as ``dataclasses.asdict`` gives it; None when the node is silent.
    """
    if values is None:
        reports.pop(index, None)
        return
    report = NodeReport.of(values)
    reports[index] = reports[index].joined(report) if index in reports else report


def pairings(ring: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns the pairs that exchange data at the same time, pairing by pairing.

    Two nodes have one pairing. An even ring has two: the second is the first, shifted by one. An odd ring has a third,
    which is the pair of its two ends.
    """
    count = len(ring)
    if count < 2:
        return []
    if count == 2:
        return [[(ring[0], ring[1])]]
    pairs = [(ring[at], ring[(at + 1) % count]) for at in range(count)]
    if count % 2 == 0:
        return [pairs[0::2], pairs[1::2]]
    return [pairs[0:-1:2], pairs[1:-1:2], [pairs[-1]]]


def decide(names: Sequence[str], reports: Mapping[int, NodeReport], slower_than: float) -> Verdict:
    """Returns the verdict on nodes 0 to ``len(names) - 1``.

    Args:
        names: the name of each node.
        reports: the reports that came, by index.
        slower_than: the factor above the median from which a node is slow.
    """
    broken = {
        index: ["it did not report in time"] if index not in reports else list(reports[index].problems)
        for index in range(len(names))
        if index not in reports or reports[index].problems
    }
    failed = _failed_exchanges(reports)
    reached = {index for index, report in reports.items() if _succeeded(report, failed)}
    for (one, other), problem in failed.items():
        if one in reached and other in reached:  # one end has to go, unless one of them goes anyway
            if not {one, other} & set(broken):
                broken.setdefault(other, []).append(f"its link to {names[one]} is broken ({problem})")
            continue
        for witness, accused in ((one, other), (other, one)):
            if witness in reached and accused in reports:
                broken.setdefault(accused, []).append(f"its exchange with {names[witness]} failed ({problem})")
    has_failed = {index for pair in failed for index in pair}
    unproven = {index for index in reports if index in has_failed and index not in reached and index not in broken}
    slow = _slow({index: report for index, report in reports.items() if index not in broken}, slower_than)
    nodes = []
    for index, name in enumerate(names):
        state: State = "ok"
        reasons: list[str] = []
        if index in broken:
            state, reasons = "broken", broken[index]
        elif index in unproven:
            state, reasons = "unproven", [f"none of its exchanges succeeded ({_first_problem(index, failed)})"]
        elif index in slow:
            state, reasons = "slow", slow[index]
        seconds = reports[index].seconds() if index in reports else dict.fromkeys(NOISE_SEC)
        nodes.append(NodeResult(index, name, state, tuple(reasons), seconds))
    return Verdict(tuple(nodes))


def next_ring(verdict: Verdict, tried: int) -> list[int] | None:
    """Returns the ring of another round of exchanges, which may show what is right with unproven nodes.

    Args:
        verdict: the verdict on all rounds so far.
        tried: the number of rings so far.

    Returns:
        The indexes of the nodes in the order of the new ring. None when no other ring can show more.
    """
    unproven = verdict.with_state("unproven")
    if not unproven or tried >= _MOST_RINGS:
        return None
    left = [node.index for node in verdict.nodes if node.state != "broken"]
    if len(left) > len(unproven):  # beside nodes that were reached: each unproven one stands between two of these
        good = [index for index in left if index not in unproven]
        ring: list[int] = []
        for at, index in enumerate(unproven):
            ring += [index, *([good[at]] if at < len(good) else [])]
        return ring + good[len(unproven) :]
    is_smaller = bool(verdict.with_state("broken"))
    shows_more = len(left) >= 2 if is_smaller else len(left) >= 4 and tried == 1  # three nodes have met all others
    return left[0::2] + left[1::2] if shows_more else None


def final(verdict: Verdict) -> Verdict:
    """Returns the verdict when no other ring follows.

    Unproven nodes are broken then. There is one exception: when all others are broken, nothing speaks against a single
    unproven node, which has nothing to exchange data with.
    """
    unproven = verdict.with_state("unproven")
    is_alone = len(unproven) == 1 and len(verdict.with_state("broken")) == len(verdict.nodes) - 1
    nodes = []
    for node in verdict.nodes:
        if node.state != "unproven":
            nodes.append(node)
        elif is_alone:
            nodes.append(NodeResult(node.index, node.name, "ok", (), node.seconds))
        else:
            nodes.append(NodeResult(node.index, node.name, "broken", node.reasons, node.seconds))
    return Verdict(tuple(nodes))


def _failed_exchanges(reports: Mapping[int, NodeReport]) -> dict[tuple[int, int], str]:
    """Returns the pairs whose last exchange failed for either side, the lower index first, with the first problem."""
    failed: dict[tuple[int, int], str] = {}
    for report in reports.values():
        for each in report.exchanges:
            if each.seconds is None:
                pair = (min(report.index, each.peer), max(report.index, each.peer))
                failed.setdefault(pair, each.problem)
    return failed


def _succeeded(report: NodeReport, failed: Mapping[tuple[int, int], str]) -> bool:
    """Whether an exchange of the node succeeded for both sides."""
    pairs = [(min(report.index, each.peer), max(report.index, each.peer)) for each in report.exchanges]
    return any(pair not in failed for pair in pairs)


def _first_problem(index: int, failed: Mapping[tuple[int, int], str]) -> str:
    return next(problem for pair, problem in failed.items() if index in pair)


def _slow(reports: Mapping[int, NodeReport], slower_than: float) -> dict[int, list[str]]:
    """Returns why nodes are slow, by index. Of two medians the lower counts, so that one of two nodes can be slow."""
    slow: dict[int, list[str]] = {}
    for part, noise in NOISE_SEC.items():
        seconds = {index: report.seconds()[part] for index, report in reports.items()}
        known = {index: value for index, value in seconds.items() if value is not None}
        if len(known) < 2:
            continue
        median = statistics.median_low(known.values())
        for index, value in known.items():
            if value > slower_than * median and value - median > noise:
                times = f"{value / median:.1f} times" if median else "more than"
                slow.setdefault(index, []).append(f"{part} took {value:.3g} s, {times} the median of {median:.3g} s")
    return slow
