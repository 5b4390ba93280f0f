"""Checks the nodes of a Ray cluster before a job: an actor on each node measures it, and this process decides.

Each actor hosts a store, at which the node meets its neighbours of higher index. So a node that cannot be reached
spoils the exchanges of its own neighbours alone.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition
from ..preflight.node_check import CheckSettings, measure
from ..preflight.node_verdict import NodeReport, Verdict, add_report, decide, final, next_ring

_GRACE_SEC = 5.0
_DIAL_SEC = 3.0


class NodeProbe:
    """The actor that measures its node."""

    def __init__(self, settings: dict[str, Any]) -> None:
        folder = settings["folder"]
        self._settings = CheckSettings(**{**settings, "folder": None if folder is None else Path(folder)})
        self._store: Any = None

    def open(self) -> tuple[str, str, int]:
        """Opens the store of this node; returns the node's name, its address, and the port of the store."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_DIAL_SEC))
        return f"{socket.gethostname()}, process {os.getpid()}", address, self._store.port

    def measure(self, index: int, ring: list[int], stores: dict[int, tuple[str, int]], tried: int) -> dict[str, Any]:
        """Measures this node; see :func:`measure`.

        Args:
            index: the index of this node.
            ring: the nodes of the ring.
            stores: the address and the port of each node's store.
            tried: the number of rings before this one.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        def connect(owner: int) -> Any:
            timeout = timedelta(seconds=self._settings.timeout_sec)
            return TCPStore(*stores[owner], is_master=False, wait_for_workers=False, timeout=timeout)

        return asdict(measure(self._settings, index, ring, connect, tried=tried))


@dataclass(frozen=True)
class CheckedRayNodes:
    """What a check of a Ray cluster found.

    Attributes:
        verdict: the verdict on all nodes.
        ids: the id that Ray gave each node, by index.
        cpus: the CPUs of each node, by index.
    """

    verdict: Verdict
    ids: tuple[str, ...]
    cpus: tuple[float, ...]

    @property
    def bad_ids(self) -> list[str]:
        """The ids of the nodes that are slow or broken."""
        return [self.ids[index] for index in self.verdict.bad]


def check_ray_nodes(settings: CheckSettings, *, cpus: float = 1.0) -> CheckedRayNodes:
    """Checks the nodes of the Ray cluster that this process is connected to.

    Args:
        settings: the settings of the check.
        cpus: the CPUs that a node must have in all to be checked.

    Raises:
        FailedPrecondition: no node has so many CPUs.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= max(cpus, 1e-9)]
    if not nodes:
        raise FailedPrecondition(f"node check: no node of the Ray cluster has {cpus:g} CPUs")
    values = {**asdict(settings), "folder": None if settings.folder is None else str(settings.folder)}
    probes = []
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        probes.append(ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=where).remote(values))
    try:
        verdict = _check(probes, [f"node {node['NodeID'][:8]}" for node in nodes], settings)
    finally:
        for probe in probes:
            ray.kill(probe)
    sizes = tuple(float(node["Resources"]["CPU"]) for node in nodes)
    return CheckedRayNodes(verdict, tuple(node["NodeID"] for node in nodes), sizes)


def _check(probes: list[Any], names: list[str], settings: CheckSettings) -> Verdict:
    opened = _answers({index: probe.open.remote() for index, probe in enumerate(probes)}, settings.timeout_sec)
    names = [f"{name} ({opened[index][0]})" if index in opened else name for index, name in enumerate(names)]
    stores = {index: (address, port) for index, (_, address, port) in opened.items()}
    ring, tried = sorted(opened), 0
    reports: dict[int, NodeReport] = {}
    while True:
        asked = {index: probes[index].measure.remote(index, ring, stores, tried) for index in ring}
        answers = _answers(asked, settings.longest_sec + _GRACE_SEC)
        for index in ring:
            add_report(reports, index, answers.get(index))
        tried += 1
        verdict = decide(names, reports, settings.slower_than)
        following = next_ring(verdict, tried)
        if following is None:
            return final(verdict)
        ring = following


def _answers(asked: dict[int, Any], seconds: float) -> dict[int, Any]:
    """Returns the answers that came in time; an actor that failed, or whose node is gone, has none."""
    import ray

    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
    answers = {}
    for index, reference in asked.items():
        if reference in ready:
            try:
                answers[index] = ray.get(reference, timeout=_GRACE_SEC)
            except ray.exceptions.RayError:
                continue
    return answers


def nodes_to_avoid(job: JobConfig, cpus_per_worker: float) -> list[str]:
    """Checks the nodes as ``train.node_check`` says; returns the ids of those that the job is not to use.

    Args:
        job: the job, which has that section.
        cpus_per_worker: the CPUs of each worker.

    Raises:
        FailedPrecondition: a node is bad, and the others have no room for the workers. The text names the node.
    """
    config = job.train.node_check
    assert config is not None
    found = check_ray_nodes(CheckSettings.of(config, on_host=job.train.is_on_host), cpus=cpus_per_worker)
    bad = found.verdict.bad
    if not bad:
        return []
    good = [size for index, size in enumerate(found.cpus) if index not in bad]
    room = sum(int(size / cpus_per_worker) if cpus_per_worker else job.train.workers for size in good)
    summary = f"node check: {found.verdict.sentence()}"
    if room < job.train.workers:
        raise FailedPrecondition(
            f"{summary}; the other nodes have room for {room} workers, and train.workers is {job.train.workers}"
        )
    print(f"sparserow: {summary}; the job runs without it", flush=True)
    return found.bad_ids
