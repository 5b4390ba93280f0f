"""The parts of a check of a node: what breaks in each of them, and what a hang becomes."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from node_threads import run_nodes
from sparserow.deploy.preflight import node_check
from sparserow.deploy.preflight.node_check import (
    CheckSettings,
    measure,
    time_disk,
    time_exchange,
    time_matrices,
    within,
)
from sparserow.deploy.preflight.node_meeting import CheckedNodes, NodePlace
from sparserow.deploy.preflight.node_verdict import NodeResult, Verdict
from sparserow.deploy.preflight.spare_nodes import least_nodes
from sparserow.deploy.train.checked_nodes import replaced
from sparserow.deploy.train.training_job import TorchrunPlace
from sparserow.proto.config.node_check_config import NodeCheckConfig
from sparserow.proto.config.train_config import TrainConfig
from sparserow.proto.errors import DataLoss, DeadlineExceeded


@pytest.fixture
def connect() -> Callable[[int], Any]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda _: TCPStore(
        "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
    )


def test_a_ring_of_good_nodes_reports_all_parts(connect: Callable[[int], Any], tmp_path: Path) -> None:
    settings = CheckSettings(timeout_sec=30.0, folder=tmp_path)
    reports = run_nodes(3, lambda index: measure(settings, index, [0, 1, 2], connect))
    for index, report in reports.items():
        assert report.problems == ()
        assert {each.peer for each in report.exchanges} == {0, 1, 2} - {index}
        assert all(0 < value < 30 for value in report.seconds().values())
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_never_comes_is_a_problem_of_that_exchange(connect: Callable[[int], Any]) -> None:
    """Node 2 is absent: each of the others has one exchange that succeeds, though its other one hangs before that."""
    settings = CheckSettings(timeout_sec=5.0)  # on a busy machine an exchange that succeeds takes more than 2
    began = time.monotonic()
    reports = run_nodes(2, lambda index: measure(settings, index, [2, 0, 1], connect, tried=1))
    assert time.monotonic() - began < 60
    for index, report in reports.items():
        found = {each.peer: each for each in report.exchanges}
        assert found[1 - index].seconds is not None
        assert found[2].seconds is None
        assert found[2].problem
        assert report.matrices_sec is None, "a later ring measures exchanges alone"


def test_numbers_that_change_on_the_way_are_a_problem(connect: Callable[[int], Any]) -> None:
    """Both sides send by the index that they are called with; here node 1 calls itself node 5."""
    results = run_nodes(2, lambda index: time_exchange(connect(0), (0, 5)[index], (1, 0)[index], "pair", 20.0))
    assert isinstance(results[0], DataLoss)
    assert isinstance(results[1], float)


def test_a_wrong_product_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_matrices(torch.device("cpu")) > 0
    multiply = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        multiply(a, b, out=out)
        out[3, 5] += 1
        return out

    monkeypatch.setattr(torch, "mm", wrong)
    report = measure(CheckSettings(), 0, [0], lambda _: None)
    assert report.problems == ("matrices failed (cpu computed a wrong product)",)
    assert report.matrices_sec is None


@pytest.mark.parametrize(
    ("train", "measured"),
    [({}, ["cuda:0", "cuda:1"]), ({"device": "cpu"}, ["cpu"]), ({"dense": "ps", "staleness": 4}, ["cpu"])],
)
def test_devices_that_a_job_leaves_alone_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], measured: list[str]
) -> None:
    tried: list[str] = []

    def timed(where: torch.device) -> float:
        tried.append(str(where))
        return 1.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(node_check, "time_matrices", timed)
    settings = CheckSettings.of(NodeCheckConfig(), on_host=TrainConfig(**train).is_on_host)
    assert measure(settings, 0, [0], lambda _: None).matrices_sec == 1.0
    assert tried == measured


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_disk_that_refuses_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((node_check, "_write_all", refuse) if call == "write" else (os, "fdatasync", refuse)))
    (told,) = measure(CheckSettings(folder=tmp_path), 0, [0], lambda _: None).problems
    assert "disk failed ([Errno 28] No space left on device)" in told
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_change_on_the_disk_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = node_check._read_all
    monkeypatch.setattr(node_check, "_read_all", lambda file, size: read(file, size)[:-1] + b"\0")
    with pytest.raises(DataLoss, match="other bytes were read than were written"):
        time_disk(tmp_path)


def test_a_part_that_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(node_check, "time_disk", lambda _: hang.wait(60))
    report = measure(CheckSettings(timeout_sec=2.0), 0, [0], lambda _: None)
    hang.set()
    assert report.problems == ("disk failed (it did not end in 2 s)",)
    with pytest.raises(DeadlineExceeded, match="it did not end in 0 s"):
        within(0.0, lambda: time.sleep(0.2))


TORCHRUN = ["/usr/bin/python", "/venv/bin/torchrun"]


@pytest.mark.parametrize(
    ("command", "environment", "least"),
    [
        ([*TORCHRUN, "--nnodes=2:4", "train.py"], {}, 2),
        ([*TORCHRUN, "--nnodes", "3", "--no-python", "sparserow", "train", "job.yaml"], {}, 3),
        (["python", "-m", "torch.distributed.run", "--nnodes", "1:8", "-m", "sparserow.deploy.cli"], {}, 1),
        (["python", "-u", "/site-packages/torch/distributed/run.py", "--nnodes=5:6", "train.py"], {}, 5),
        ([*TORCHRUN, "train.py"], {"PET_NNODES": "2:3"}, 2),
        ([*TORCHRUN, "--nnodes=4", "train.py"], {"PET_NNODES": "2:3"}, 4),
        ([*TORCHRUN, "train.py", "--nnodes=9"], {}, 1),
        (["accelerate", "launch", "train.py"], {"PET_NNODES": "2:3"}, None),
        ([*TORCHRUN, "--nnodes=many", "train.py"], {}, None),
        ([], {}, None),
    ],
)
def test_spare_nodes_are_read_as_torchrun_reads_them(
    command: list[str], environment: dict[str, str], least: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert least_nodes(command, environment) == least
    assert capsys.readouterr().err == ""


def test_ranks_of_the_nodes_that_are_left_have_no_gap() -> None:
    sizes = (2, 1, 0, 3)
    bad = (1, 2)
    nodes = [NodeResult(at, f"node {at}", "slow" if at in bad else "ok", (), {}) for at in range(4)]
    found = CheckedNodes(Verdict(tuple(nodes)), sizes)
    assert found.good == (0, 3)
    ranks = []
    for node in found.good:
        for local in range(sizes[node]):
            rank = sum(sizes[:node]) + local
            where = NodePlace(node, 4, local, sizes[node], rank, ("a", 1), hosts_store=False)
            place = replaced(TorchrunPlace(rank, 6, sizes[node], "run"), where, found)
            assert (place.world, place.local_world, place.run) == (5, sizes[node], "run")
            ranks.append(place.rank)
    assert ranks == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("told", "hosts"), [("True", False), ("False", True), (None, True)])
def test_the_place_is_read_from_torchruns_variables(
    monkeypatch: pytest.MonkeyPatch, told: str | None, hosts: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert NodePlace.from_environment() is None
    values = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "RANK": "6"}
    values |= {"MASTER_ADDR": "host", "MASTER_PORT": "29", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**values, **({} if told is None else {"TORCHELASTIC_USE_AGENT_STORE": told})}.items():
        monkeypatch.setenv(name, value)
    if told is None:
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert NodePlace.from_environment() == NodePlace(1, 3, 2, 4, 6, ("host", 29), hosts)
