"""Checks for ``sparserow doctor`` whether shards that share memory with this process run on other NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from .finding import Finding

_NODES, _PROCESSES = Path("/sys/devices/system/node"), Path("/proc")


def memory_nodes_finding(
    pids: Mapping[int, int], *, nodes: Path = _NODES, processes: Path = _PROCESSES, mine: int | None = None
) -> Iterator[Finding]:
    """Warns of shards whose CPUs are all on other nodes than those of this process, as their rows cross between nodes.

    Args:
        pids: the process of each shard that shares memory, by shard.
        nodes: the system's folder of NUMA nodes.
        processes: the system's folder of processes.
        mine: the process that reads the rows; None: this one.
    """
    cpus = {
        int(each.name.removeprefix("node")): _of_list((each / "cpulist").read_text())
        for each in nodes.glob("node[0-9]*")
    }

    def nodes_of(pid: int) -> set[int]:
        allowed = _allowed_cpus(processes / str(pid) / "status")
        return {node for node, its in cpus.items() if its & allowed}

    here = nodes_of(os.getpid() if mine is None else mine)
    there = {shard: nodes_of(pid) for shard, pid in pids.items()}
    far = {shard: its for shard, its in there.items() if its and here and not its & here}
    if far:
        where = ", ".join(f"shard {shard} on {_text(its)}" for shard, its in far.items())
        yield Finding(
            "cluster",
            "warning",
            f"this process runs on NUMA node {_text(here)}, {where}: rows cross between nodes",
            f"start both on one node: numactl --cpunodebind={_text(here)} --membind={_text(here)} sparserow ps ...",
        )


def _text(nodes: set[int]) -> str:
    return ",".join(map(str, sorted(nodes)))


def _allowed_cpus(status: Path) -> set[int]:
    """Returns the CPUs on which a process may run; none where that is not to be read."""
    try:
        lines = status.read_text().splitlines()
    except OSError:  # it has ended, or is of another user
        return set()
    return next((_of_list(line.split(":")[1]) for line in lines if line.startswith("Cpus_allowed_list:")), set())


def _of_list(text: str) -> set[int]:
    """Returns the numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
