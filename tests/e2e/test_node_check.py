"""Nodes are checked before a job under torchrun: real agents, of which one is really slow, or has a broken link."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import hosts as network
from long_form import FULL
from sparserow.worker.data import write_click_log
from sparserow_process import Launcher, Process, free_port

TIMEOUT = "20s"
PROCESSES = 2 if FULL else 1  # of each node that is left


class Nodes:
    """Agents of torchrun, one a node, which meet at the first."""

    def __init__(self, launcher: Launcher, folder: Path, nnodes: str, address: str = "127.0.0.1") -> None:
        self._launcher, self._folder, self._nnodes = launcher, folder, nnodes
        self._meets_at = f"{address}:{free_port()}"
        self.agents: list[Process] = []

    def start(
        self,
        *arguments: str,
        processes: int = 1,
        script: str | None = None,
        address: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> Process:
        """Starts the next node, whose processes run ``sparserow ARGUMENTS``."""
        options = [f"--nnodes={self._nnodes}", f"--nproc-per-node={processes}", "--monitor-interval=0.2"]
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self._meets_at}", "--rdzv-id=nodes"]
        options += [f"--rdzv-conf=is_host={int(not self.agents)},last_call_timeout=2", f"--local-addr={address}"]
        agent = self._launcher.start_torchrun(*options, arguments=arguments, script=script, within=within)
        self.agents.append(agent)
        return agent

    def told(self) -> str:
        """What all of them wrote on standard error."""
        return "\n".join(agent.err for agent in self.agents)


def write_job(folder: Path, timeout: str = TIMEOUT) -> Path:
    log = write_click_log(folder, rows=1000, test_rows=200, seed=3)
    job = folder / "job.yaml"
    job.write_text(
        f"data: {{format: criteo, train: {log.train}, test: {log.test}}}\n"
        "model: {class: DLRM, backend: local, args: {rows: {'*': 1000}}, min_rows: 1}\n"
        f"train: {{threads: 1, batch_size: 128, node_check: {{timeout: {timeout}, slower_than: 3.0}}}}\n"
    )
    return job


def slowed_pid(agent: Process) -> str:
    return agent.wait_for(r"slowed (\d+)")[1]


def test_a_slow_node_is_left_out_where_there_is_a_spare(launcher: Launcher, tmp_path: Path) -> None:
    """It is node 0, which hosts both the check's store and, with this variable, the one of torchrun's workers."""
    launcher.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    job, nodes, result = write_job(tmp_path), Nodes(launcher, tmp_path, "2:3"), tmp_path / "result.json"
    arguments = ("train", str(job), "--json", str(result))
    slow = nodes.start(*arguments, script="slowed_node.py")
    for _ in range(2):
        nodes.start(*arguments, processes=PROCESSES)
    for agent in nodes.agents:
        assert agent.end() == 0, nodes.told()
    assert json.loads(result.read_text())["workers"] == 2 * PROCESSES
    told = re.search(
        r"node check: (node \d) \(.*, process (\d+)\) is slow: matrices took .* the job runs on 2 nodes", nodes.told()
    )
    assert told, nodes.told()
    assert told[2] == slowed_pid(slow)
    assert told[1] == "node 0"
    assert "node check: this is node 0, which is left out" in slow.err


def test_without_a_spare_the_job_ends_with_the_name(launcher: Launcher, tmp_path: Path) -> None:
    job, nodes = write_job(tmp_path), Nodes(launcher, tmp_path, "2")
    nodes.start("train", str(job))
    slow = nodes.start("train", str(job), script="slowed_node.py")
    assert nodes.agents[0].end() != 0  # the others look for it for half a minute
    pattern = rf"node check: node \d \(.*, process {slowed_pid(slow)}\) is slow: .*; 1 node would be left .* it needs 2"
    for agent in nodes.agents:
        agent.wait_for(pattern)
    assert "trained" not in "".join(agent.out for agent in nodes.agents)


@pytest.mark.full
def test_the_doctor_shows_all_nodes(launcher: Launcher, tmp_path: Path) -> None:
    nodes, found = Nodes(launcher, tmp_path, "2"), tmp_path / "found.json"
    arguments = ("doctor", "--nodes", f"--json={found}", f"--disk={tmp_path}", "--slower-than=3")
    nodes.start(*arguments)
    slow = nodes.start(*arguments, script="slowed_node.py")
    assert nodes.agents[0].end() == 1, nodes.told()
    values = json.loads(found.read_text())
    (bad,) = values["bad"]
    assert f"process {slowed_pid(slow)}" in values["nodes"][bad]["name"]
    assert [node["state"] for node in values["nodes"]].count("ok") == 1
    assert all(0 < part < 60 for node in values["nodes"] for part in node["seconds"].values())
    shown = "".join(agent.out for agent in nodes.agents)
    assert shown.count("1 of 2 nodes are slow or broken") == 1, "node 0 alone shows the table"
    assert re.search(r"node +matrices +exchange +disk +state +why", shown)


def test_the_doctor_wants_one_process_a_node(launcher: Launcher, tmp_path: Path) -> None:
    agent = Nodes(launcher, tmp_path, "1").start("doctor", "--nodes", processes=2)
    assert agent.end() != 0
    assert "--nodes: needs one process a node, and torchrun started 2 on this one" in agent.err


@pytest.mark.full
@pytest.mark.skipif(network.why_not() != "", reason=network.why_not() or "")
def test_the_node_with_the_broken_links_is_known(launcher: Launcher, tmp_path: Path) -> None:
    """Node 2 still reaches the store of node 0, so it reports; neither of its neighbours reaches it."""
    job, result = write_job(tmp_path, timeout="6s"), tmp_path / "result.json"
    launcher.environment["GLOO_SOCKET_IFNAME"] = "eth0"
    with network.hosts("n0", "n1", "n2", "n3") as hosts:
        if not all(hosts["n2"].drop_from(hosts[name].address) for name in ("n1", "n3")):
            pytest.skip("links are broken with nftables, which is not there")
        nodes = Nodes(launcher, tmp_path, "3:4", hosts["n0"].address)
        for host in hosts.values():  # torchrun orders its nodes by address
            nodes.start("train", str(job), "--json", str(result), address=host.address, within=host.within)
        for agent in nodes.agents:
            assert agent.end() == 0, nodes.told()
    assert re.search(
        r"node check: node 2 \(.*\) is broken: its exchange with node 1 .* failed .* its exchange with node 3 .*; "
        "the job runs on 3 nodes",
        nodes.told(),
    ), nodes.told()
    assert json.loads(result.read_text())["workers"] == 3
