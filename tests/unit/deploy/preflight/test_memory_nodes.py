from __future__ import annotations

from pathlib import Path

import pytest

from sparserow.deploy.preflight.memory_nodes import memory_nodes_finding


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes of four CPUs; process 1 runs on node 0, 2 on node 1, 3 on both."""
    for node, cpus in enumerate(("0-1,4-5\n", "2-3,6-7\n")):
        (tmp_path / "nodes" / f"node{node}").mkdir(parents=True)
        (tmp_path / "nodes" / f"node{node}" / "cpulist").write_text(cpus)
    (tmp_path / "nodes" / "online").write_text("0-1\n")
    for pid, allowed in ((1, "0-1"), (2, "2,6"), (3, "0-7")):
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "status").write_text(f"Name:\tx\nCpus_allowed_list:\t{allowed}\n")
    return tmp_path


def texts(machine: Path, pids: dict[int, int], mine: int) -> list[str]:
    found = memory_nodes_finding(pids, nodes=machine / "nodes", processes=machine / "proc", mine=mine)
    return [each.text for each in found]


def test_a_shard_whose_cpus_are_all_on_another_node_is_named(machine: Path) -> None:
    (text,) = texts(machine, {0: 1, 1: 2, 2: 3}, mine=1)
    assert text == "this process runs on NUMA node 0, shard 1 on 1: rows cross between nodes"
    (text,) = texts(machine, {0: 1, 1: 2}, mine=2)
    assert "runs on NUMA node 1, shard 0 on 0" in text


def test_nothing_is_said_of_processes_that_may_run_on_one_node(machine: Path) -> None:
    assert texts(machine, {0: 1, 2: 3}, mine=1) == []
    assert texts(machine, {0: 1, 1: 2}, mine=3) == []


def test_a_process_that_is_gone_and_a_system_without_nodes_are_no_problem(machine: Path) -> None:
    assert texts(machine, {0: 99}, mine=1) == []
    assert texts(machine, {0: 2}, mine=99) == []
    assert list(memory_nodes_finding({0: 2}, nodes=machine / "none", processes=machine / "proc", mine=1)) == []


def test_this_machine_is_read() -> None:
    import os

    assert list(memory_nodes_finding({0: os.getpid()})) == []
