"""The check of nodes under torchrun: how the nodes find each other, report, and learn the verdict.

Node 0 hosts a store of the check's own and writes its address into torchrun's store. Under the same run id that store
may have an address of an earlier start of the workers, whose process is gone; such an address is tried again until it
is replaced. Every key of the check is in the own store, which no earlier start has seen:

    arrived/INDEX     a node is there: its name, and the number of its processes
    order/N           node 0 says what comes next: {"ring": [...]}, or {"verdict": ...} at the end
    report/N/INDEX    what a node measured in ring N
    pulse/INDEX       a count that a node of the job increases as long as the job runs
    read              the count of processes that know the verdict
    done              the count of nodes whose part of the job ended well
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ...proto.errors import DeadlineExceeded, SparserowError, Unavailable
from .node_check import CheckSettings, first_line, measure
from .node_verdict import NodeReport, Verdict, add_report, decide, final, next_ring

_GRACE_SEC = 5.0  # for the messages of the check itself
_POLL_SEC = 0.05
_DIAL_SEC = 3.0
_PULSE_SEC = 1.0
_SILENCE_SEC = 30.0
_WHERE = "sparserow/node-check"


@dataclass(frozen=True)
class NodePlace:
    """The position of this process among the nodes that torchrun started.

    Attributes:
        node, nodes: the index of its node, and the number of nodes; each node has one agent of torchrun.
        local_rank, local_world: its rank among the processes of its node, and their number.
        rank: its rank among all processes.
        store: host and port of torchrun's store.
        hosts_store: whether the process of rank 0 has to host torchrun's store, as no agent does.
    """

    node: int
    nodes: int
    local_rank: int
    local_world: int
    rank: int
    store: tuple[str, int]
    hosts_store: bool

    @classmethod
    def from_environment(cls) -> NodePlace | None:
        """Returns the position that torchrun set in the environment; None when torchrun did not start this process."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK")
        node, nodes, local_rank, local_world, rank = (int(os.environ[name]) for name in names)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return cls(node, nodes, local_rank, local_world, rank, address, hosts_store)


@dataclass(frozen=True)
class CheckedNodes:
    """What all processes learn from a check.

    Attributes:
        verdict: the verdict on all nodes.
        processes: the number of processes of each node; 0 of a node that did not arrive.
    """

    verdict: Verdict
    processes: tuple[int, ...]

    @property
    def good(self) -> tuple[int, ...]:
        """The indexes of the nodes that are neither slow nor broken."""
        return tuple(index for index in range(len(self.processes)) if index not in self.verdict.bad)


class NodeMeeting:
    """The nodes of a run, seen from one process; one thread uses it.

    Args:
        place: the position of this process.
        settings: the settings of the check.

    Attributes:
        address: host and port of the check's own store, once :meth:`check` has returned.

    Raises:
        Unavailable: torchrun's store, or node 0, cannot be reached in time.
    """

    def __init__(self, place: NodePlace, settings: CheckSettings) -> None:
        self._place, self._settings = place, settings
        self._launchers: Any = None  # a store ends with the object, where this process hosts it
        self.address: tuple[str, int] = ("", 0)
        self._own: Any = self._meet()  # torch's types name neither the classes of stores nor their clone()

    def check(self) -> CheckedNodes:
        """Checks this node, and returns what was found about all nodes; node 0 decides it.

        The process with local rank 0 measures its node. The other processes of a node wait for the verdict.

        Raises:
            Unavailable: node 0 cannot be reached any more.
            DeadlineExceeded: node 0 has not decided in time.
        """
        try:
            return self._check()
        except SparserowError:
            raise
        except RuntimeError as error:  # torch's errors of stores
            host, port = self.address
            raise Unavailable(
                f"node check: node {self._place.node} cannot reach node 0 at {host}:{port} any more "
                f"({first_line(error)})"
            ) from error

    def _check(self) -> CheckedNodes:
        place, timeout = self._place, self._settings.timeout_sec
        if place.local_rank == 0:
            name = f"node {place.node} ({socket.gethostname()}, process {os.getpid()})"
            self.give(f"arrived/{place.node}", {"name": name, "processes": place.local_world})
        decider = _Decider(self, place.nodes, self._settings) if place.rank == 0 else None
        number, wait_sec = 0, 2 * timeout
        while True:
            if decider is not None:
                decider.give_order(number)
            order = self.get(f"order/{number}", wait_sec + _GRACE_SEC)
            if "verdict" in order:
                self._own.add("read", 1)
                if decider is not None:
                    self._wait_for_readers(sum(order["processes"]))
                return CheckedNodes(Verdict.of(order["verdict"]), tuple(order["processes"]))
            if place.local_rank == 0 and place.node in order["ring"]:
                report = measure(self._settings, place.node, order["ring"], lambda _: self._own.clone(), tried=number)
                self.give(f"report/{number}/{place.node}", asdict(report))
            number, wait_sec = number + 1, self._settings.longest_sec + 2 * _GRACE_SEC

    def _wait_for_readers(self, processes: int) -> None:
        """Waits until all processes have read the verdict, as the store ends with this process."""
        deadline = time.monotonic() + _GRACE_SEC
        while self._own.add("read", 0) < processes and time.monotonic() < deadline:
            time.sleep(_POLL_SEC)

    def get(self, key: str, seconds: float) -> Any:
        """Returns the value of a key of the check's own store, when some node has set it.

        Raises:
            DeadlineExceeded: it was not set in time.
        """
        if self.present([key], seconds) != [key]:
            raise DeadlineExceeded(
                f"node check: node 0 said nothing for {seconds:.0f} s; look at its messages, or raise the time-out"
            )
        return json.loads(self._own.get(key))

    def present(self, keys: Iterable[str], seconds: float) -> list[str]:
        """Returns those of the keys that are set, when all are or the time is over."""
        waited, deadline = list(keys), time.monotonic() + seconds
        missing = waited
        while True:
            missing = [key for key in missing if not self._own.check([key])]
            if not missing or time.monotonic() > deadline:
                return [key for key in waited if key not in missing]
            time.sleep(_POLL_SEC)

    def give(self, key: str, value: Any) -> None:
        """Sets a key of the check's own store."""
        self._own.set(key, json.dumps(value))

    @contextlib.contextmanager
    def pulse(self) -> Iterator[None]:
        """Shows the nodes that were left out, for the duration of the block, that the job runs, and that it ended well.

        The job does not end when it cannot reach them.
        """
        if self._place.local_rank != 0:
            yield
            return
        ended, store = threading.Event(), self._own.clone()

        def beat() -> None:
            with contextlib.suppress(RuntimeError):
                while not ended.wait(_PULSE_SEC):
                    store.add(f"pulse/{self._place.node}", 1)

        threading.Thread(target=beat, name="sparserow-node-pulse", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
        with contextlib.suppress(RuntimeError):
            self._own.add("done", 1)
        self._linger()

    def wait_for_end(self, nodes: Iterable[int]) -> None:
        """Waits, in a process of a node that was left out, until the job of the other nodes has ended.

        It stays because the end of its workers ends an agent of torchrun, and then no agent can start workers again.

        Args:
            nodes: the nodes of the job.

        Raises:
            Unavailable: these nodes have not given a sign of life for half a minute, and none has ended well.
        """
        keys = [f"pulse/{node}" for node in nodes]
        last, heard = [-1] * len(keys), time.monotonic()
        done = 0
        with contextlib.suppress(RuntimeError):  # the node with the store has ended
            while done < len(keys) and time.monotonic() - heard < _SILENCE_SEC:
                time.sleep(_PULSE_SEC)
                done = self._own.add("done", 0)
                counts = [self._own.add(key, 0) for key in keys]
                if counts != last:
                    last, heard = counts, time.monotonic()
        self._linger()
        if not done:
            raise Unavailable("node check: the nodes of the job, which this node was left out of, are silent")

    def _linger(self) -> None:
        """Waits until nodes that were left out have seen the last count, where this process hosts the store."""
        if self._place.rank == 0:
            time.sleep(3 * _PULSE_SEC)

    def _meet(self) -> Any:
        """Returns the check's own store, which the process of rank 0 hosts.

        Raises:
            Unavailable: torchrun's store or node 0 cannot be reached in time.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        place, timeout = self._place, self._settings.timeout_sec
        deadline = time.monotonic() + timeout
        host, port = place.store
        try:
            launchers = TCPStore(
                host,
                port,
                is_master=place.hosts_store and place.rank == 0,
                wait_for_workers=False,
                multi_tenant=place.hosts_store,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as error:
            raise Unavailable(
                f"node check: torchrun's store at {host}:{port} cannot be reached ({first_line(error)})"
            ) from error
        self._launchers = launchers
        own_timeout = timedelta(seconds=_DIAL_SEC)
        if place.rank == 0:
            own = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=own_timeout)
            self.address = (host, own.port)
            launchers.set(_WHERE, str(own.port))
            return own
        problem = "it has not given its address"
        while time.monotonic() < deadline:
            if launchers.check([_WHERE]):
                self.address = (host, int(launchers.get(_WHERE)))
                try:
                    own = TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=own_timeout)
                except RuntimeError as error:  # an address of workers that are gone
                    problem = first_line(error)
                else:
                    return own
            time.sleep(_POLL_SEC)
        raise Unavailable(f"node check: node 0 at {host} cannot be reached in {timeout:.0f} s ({problem})")


class _Decider:
    """Node 0's part: it says which nodes stand in a ring, collects their reports, and decides."""

    def __init__(self, meeting: NodeMeeting, nodes: int, settings: CheckSettings) -> None:
        self._meeting, self._settings = meeting, settings
        self._names = [f"node {index}" for index in range(nodes)]
        self._processes = [0] * nodes
        self._reports: dict[int, NodeReport] = {}
        self._ring: list[int] = []

    def give_order(self, number: int) -> None:
        """Sets order ``number``, when all nodes have done what the order before it says."""
        if number == 0:
            self._ring = self._arrived()
            self._meeting.give("order/0", {"ring": self._ring})
            return
        keys = {index: f"report/{number - 1}/{index}" for index in self._ring}
        there = set(self._meeting.present(keys.values(), self._settings.longest_sec + _GRACE_SEC))
        for index, key in keys.items():
            values = self._meeting.get(key, _GRACE_SEC) if key in there else None
            add_report(self._reports, index, values)
        verdict = decide(self._names, self._reports, self._settings.slower_than)
        ring = next_ring(verdict, number)
        self._ring = ring or []
        order: dict[str, Any] = {"ring": ring}
        if ring is None:
            order = {"verdict": asdict(final(verdict)), "processes": self._processes}
        self._meeting.give(f"order/{number}", order)

    def _arrived(self) -> list[int]:
        keys = {f"arrived/{index}": index for index in range(len(self._names))}
        ring = [keys[key] for key in self._meeting.present(keys, self._settings.timeout_sec)]
        for index in ring:
            arrived = self._meeting.get(f"arrived/{index}", _GRACE_SEC)
            self._names[index], self._processes[index] = arrived["name"], arrived["processes"]
        return ring
