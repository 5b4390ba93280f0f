"""Which device a worker trains on, and what is refused before training."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from sparserow.proto.config.parallel_config import ParallelConfig
from sparserow.proto.config.train_config import TrainConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.worker.training.training_device import group_backend, out_of_memory, training_device

HOST = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Makes this machine one with so many CUDA devices; which one was chosen."""
    current: list[int] = []

    def pretend(count: int, *, nccl: bool = True) -> list[int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
        return current

    return pretend


def device_of(device: str, *, local_rank: int = 0, local_world: int = 1, world: int = 1, dense: str = "ddp"):
    train = TrainConfig(device=device, dense=dense)
    return training_device(train, local_rank=local_rank, local_world=local_world, world=world)


def test_each_worker_of_a_machine_has_a_device_of_its_own(gpus):
    current = gpus(4)
    assert [device_of("auto", local_rank=rank, local_world=4, world=8) for rank in range(4)] == [
        torch.device("cuda", rank) for rank in range(4)
    ]
    assert current == [0, 1, 2, 3]
    assert device_of("cpu") == HOST


def test_auto_takes_the_host_where_there_is_no_device(gpus):
    gpus(0)
    assert device_of("auto") == HOST


def test_auto_takes_the_host_where_workers_are_more_than_devices_and_says_so(gpus, caplog):
    gpus(1)
    with caplog.at_level(logging.WARNING):
        assert device_of("auto", local_world=2, world=2) == HOST
    assert "1 CUDA devices for 2 workers" in caplog.text


@pytest.mark.parametrize(
    ("count", "nccl", "local_world", "world", "reason"),
    [
        (0, True, 1, 1, "finds no CUDA device"),
        (2, True, 3, 3, "2 CUDA devices for 3 workers"),
        (2, False, 2, 2, "built without NCCL"),
    ],
)
def test_cuda_is_refused_with_what_is_there(gpus, count, nccl, local_world, world, reason):
    gpus(count, nccl=nccl)
    with pytest.raises(InvalidArgument, match=rf"train.device: 'cuda' is not allowed; allowed: auto, cpu; .*{reason}"):
        device_of("cuda", local_world=local_world, world=world)


def test_one_worker_needs_no_nccl(gpus):
    gpus(1, nccl=False)
    assert device_of("cuda").type == "cuda"


def test_dense_tensors_on_the_servers_stay_on_the_host(gpus):
    gpus(2)
    assert device_of("auto", dense="ps") == HOST


def test_tensors_of_the_host_are_reduced_by_gloo():
    assert group_backend(HOST) == "gloo"
    assert group_backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_the_error_of_a_full_device_names_the_cache():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    assert "lower train.cache.bytes" in str(out_of_memory(error, 7))
    assert "lower train.batch_size or train.prefetch" in str(out_of_memory(error, None))


def test_towers_in_parts_go_to_cuda_when_they_are_told_to(gpus):
    current = gpus(2)
    for device, wanted in (("auto", HOST), ("cpu", HOST), ("cuda", torch.device("cuda", 1))):
        train = TrainConfig(device=device, parallel=ParallelConfig(tensor=2))
        assert training_device(train, local_rank=1, local_world=2, world=2) == wanted
    assert current == [1]
    gpus(1)
    with pytest.raises(InvalidArgument, match="1 CUDA devices for 2 workers"):
        training_device(train, local_rank=1, local_world=2, world=2)
