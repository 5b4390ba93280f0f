"""``bench peers``: measures other systems at the same work and the same sizes, beside this project, in one run.

Each peer that needs packages runs in an environment of its own (``peer_environments.py``). A peer's turn is a process
of its own, which ends before anything else is measured. This project is timed right before it or right after it, so
that both see the machine at one speed. A peer that cannot be installed is skipped; one whose process fails is left out.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any

import torch

from ...proto.errors import InvalidArgument
from .harness import machine_line, time_in_turns
from .peer_contests import CONTESTS, Contest, OurSide, PeerSize
from .peer_environments import Interpreter, python_of
from .peer_processes import WORKER, PeerError, measured_by_worker, timed
from .peers.pins import PEERS, Peer
from .torch_rpc import torch_rpc

Seconds = list[float]


@dataclass
class PeerResult:
    """What was measured of a peer at one work.

    Attributes:
        peer: the peer.
        contest, kind, dim: the work.
        seconds: the seconds of each repetition.
        beside: those of this project, timed next to it.
    """

    peer: Peer
    contest: Contest
    kind: str
    dim: int
    seconds: Seconds = field(default_factory=list)
    beside: Seconds = field(default_factory=list)


@dataclass
class PeersReport:
    """All that a run has found so far.

    Attributes:
        size: the sizes.
        machine: the machine and its load before the run.
        load: the load alone.
        results: the peers' figures, in the order of contests.
        ours: the seconds of this project, by contest, kind and dim.
        limits: those of raw TCP.
        versions: the versions of the packages of each peer, by its name.
        skipped: why a peer was not measured, by its name.
        failed: why a peer that could run has no figures of a contest, by its name and the contest's title.
    """

    size: PeerSize
    machine: str = field(default_factory=machine_line)
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    results: list[PeerResult] = field(default_factory=list)
    ours: dict[tuple[str, str, int], Seconds] = field(default_factory=lambda: defaultdict(list))
    limits: dict[tuple[str, str, int], Seconds] = field(default_factory=lambda: defaultdict(list))
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, PeerError] = field(default_factory=dict)
    failed: dict[tuple[str, str], PeerError] = field(default_factory=dict)


def chosen(only: str | None) -> list[Peer]:
    """Returns the peers of ``--only``, in their order; None: all.

    Raises:
        InvalidArgument: there is no peer of that name.
    """
    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else []
    known = [peer.name for peer in PEERS]
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None or (only is not None and not names):
        raise InvalidArgument(f"--only: {wrong or only!r} is no peer; allowed: {', '.join(known)}")
    return [peer for peer in PEERS if only is None or peer.name in names]


def run_peers(
    size: PeerSize,
    peers: Sequence[Peer],
    folder: Path,
    known: Sequence[Interpreter],
) -> Iterator[PeersReport]:
    """Makes the environments, and measures; yields the report after each contest, the last time with all of it.

    Args:
        size: the sizes.
        peers: the peers to measure.
        folder: the folder of environments and of the output of peers; it is created.
        known: the interpreters to make environments from; the first one is the running one.

    Raises:
        InvalidArgument: the folder cannot be created.
    """
    report = PeersReport(size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--environments {folder}: the folder cannot be created: {error.strerror}") from error
    for peer in peers:
        (folder / f"{peer.name}.log").unlink(missing_ok=True)
    pythons = _prepared(peers, folder, known, report)
    for contest in CONTESTS:
        able = [peer for peer in peers if peer.name in pythons and set(peer.works) & set(contest.works)]
        if able:
            _Turns(contest, report, folder, pythons).take(able)
        yield report


def _prepared(peers: Sequence[Peer], folder: Path, known: Sequence[Interpreter], report: PeersReport) -> dict[str, str]:
    """Returns the interpreter of each peer that can run; the report has the reasons of the others."""
    pythons: dict[str, str] = {}
    reasons: dict[str, PeerError] = {}  # by environment: what failed for one peer is not tried for the next
    for peer in peers:
        if peer.program and which(peer.program) is None:
            report.skipped[peer.name] = PeerError(f"{peer.program} is not installed")
            continue
        if peer.environment is None:
            pythons[peer.name] = known[0].path
            continue
        name = peer.environment.name
        try:
            if name not in reasons:
                pythons[peer.name] = python_of(peer.environment, folder, known)
        except PeerError as error:
            reasons[name] = error
        if name in reasons:
            report.skipped[peer.name] = reasons[name]
    return pythons


class _Turns:
    """The turns of one contest."""

    def __init__(self, contest: Contest, report: PeersReport, folder: Path, pythons: dict[str, str]) -> None:
        self._contest, self._report, self._folder, self._pythons = contest, report, folder, pythons
        self._size = report.size
        self._repetitions = contest.repeats * report.size.repetitions

    def take(self, peers: Sequence[Peer]) -> None:
        """Gives each peer as many turns as there are rounds, every second round in the reverse order."""
        contest, left = self._contest, list(peers)
        results = {
            (peer.name, kind, dim): PeerResult(peer, contest, kind, dim)
            for peer in peers
            for kind, dim in self._works(peer)
        }
        with ExitStack() as opened:
            with timed(f"{contest.title}: filling the tables of this project"):
                side = opened.enter_context(contest.open(self._size))
            for number in range(self._size.rounds):
                for peer in left[:: 1 if number % 2 == 0 else -1]:
                    try:
                        with timed(f"{contest.title}, round {number + 1} of {self._size.rounds}: {peer.title}"):
                            self._turn(peer, side, results, is_first=number % 2 == 0)
                    except PeerError as error:
                        self._report.failed[peer.name, contest.title] = error
                left = [peer for peer in left if (peer.name, contest.title) not in self._report.failed]
        names = {peer.name for peer in left}
        self._report.results += [result for result in results.values() if result.peer.name in names]

    def _works(self, peer: Peer) -> list[tuple[str, int]]:
        kinds = [kind for kind in self._contest.works if kind in peer.works]
        return [(kind, dim) for kind in kinds for dim in self._contest.dims(self._size)]

    def _turn(self, peer: Peer, side: OurSide, results: dict[Any, PeerResult], *, is_first: bool) -> None:
        works = self._works(peer)
        beside = self._beside(works, side) if is_first else {}
        seconds = self._measured(peer, works)
        beside = beside or self._beside(works, side)
        for kind, dim in works:
            result = results[peer.name, kind, dim]
            result.seconds += seconds[kind, dim]
            result.beside += beside[kind, dim]

    def _beside(self, works: Sequence[tuple[str, int]], side: OurSide) -> dict[tuple[str, int], Seconds]:
        """Times this project, in turns with raw TCP where there is that."""
        found = {}
        for kind, dim in works:
            contenders = [side.ours(kind, dim), *([side.limit(kind, dim)] if side.limit else [])]
            with self._contest.pinned():
                timed = time_in_turns(contenders, repetitions=self._repetitions, warm_up=self._size.warm_up)
            found[kind, dim] = timed[0]
            self._report.ours[self._contest.title, kind, dim] += timed[0]
            if side.limit:
                self._report.limits[self._contest.title, kind, dim] += timed[1]
        return found

    def _measured(self, peer: Peer, works: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Seconds]:
        contest, size = self._contest, self._size
        if peer.worker is None:
            self._report.versions[peer.name] = {"torch": str(torch.__version__)}
            try:
                with torch_rpc(size.dims, size.rows, size.keys, peer.transport) as rival:
                    return {(kind, dim): rival.seconds(kind, dim, self._repetitions) for kind, dim in works}
            except (OSError, EOFError, TimeoutError) as error:
                raise PeerError(f"torch RPC over {peer.transport} has ended: {error!r}") from error
        asked = {
            "works": [f"{kind} {dim}" for kind, dim in works],
            "rows": contest.rows(size),
            "keys": contest.keys(size),
            "repetitions": self._repetitions,
            "warm_up": size.warm_up,
            "threads": contest.threads or len(os.sched_getaffinity(0)),
            "cpus": contest.cpus(),
        }
        found = measured_by_worker(
            self._pythons[peer.name],
            WORKER.parent / f"{peer.worker}.py",
            asked,
            log=self._folder / f"{peer.name}.log",
            deadline_sec=size.deadline_sec,
            is_isolated=peer.environment is not None,
        )
        self._report.versions[peer.name] = found["versions"]
        return {(kind, dim): found["seconds"][f"{kind} {dim}"] for kind, dim in works}
