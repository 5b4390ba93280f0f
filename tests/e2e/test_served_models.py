"""A served model whose next version, call or device is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.inference.program_inputs import error_of_call
from sparserow_process import wait_until

IDS = torch.tensor([1, 2, 3])
AGES = torch.tensor([[0.5], [0.25], [0.0]])
ABSENT = f"cuda:{torch.cuda.device_count() + 1}"


class User(nn.Module):
    """A table of users, and a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(50, 4)
        self.tower = nn.Linear(4, 4)

    def forward(self, user: Tensor, age: Tensor) -> Tensor:
        return self.tower(self.user(user) * age)


class UserAndItem(User):
    """A model with one more table, which is read by the ids of users."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(50, 4)

    def forward(self, user: Tensor, age: Tensor) -> Tensor:
        return super().forward(user, age) + self.item(user)


class Scale(nn.Module):
    """A model one of whose arguments is a constant of its program."""

    def forward(self, age: Tensor, times: int) -> Tensor:
        return age * times


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Version 1 has the table ``user``, and version 2 has ``user`` and ``item``; no session is left."""
    folder = str(tmp_path_factory.mktemp("models"))
    with sr.local_cluster(shards=1) as cluster:
        for model in (User(), UserAndItem()):
            with sr.connect(cluster.address, "ads") as session:
                distributed = session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
                session.publish("ctr", root=folder, model=distributed, example=(IDS, AGES))
    return folder


@pytest.fixture(scope="module")
def client(root: str) -> Iterator[sr.ServingClient]:
    """A client of a process that follows the alias ``live``."""
    ModelRegistry(root).point("ctr", "live", 1)
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses, refresh_sec=0.1) as made,
    ):
        yield made


def move(client: sr.ServingClient, root: str, version: int) -> None:
    ModelRegistry(root).point("ctr", "live", version)
    wait_until(lambda: client.version == version, "the move")


@pytest.fixture
def served(client: sr.ServingClient, root: str) -> Iterator[sr.ServedModel]:
    move(client, root, 1)
    with sr.ServedModel(client, root) as made:
        yield made


def test_the_former_version_answers_when_a_table_of_the_next_one_cannot_be_bound(
    client: sr.ServingClient, root: str, served: sr.ServedModel
) -> None:
    before = served(IDS, AGES)
    move(client, root, 2)
    with sr.InProcessCluster(shards=1).connect("ads") as session:
        session.distribute(nn.ModuleDict({"item": nn.Embedding(50, 4)}), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        for _ in range(2):
            with pytest.raises(sr.errors.FailedPrecondition, match="'ads/item' is already bound in this process"):
                served.refresh()
            assert served.version == 1
            assert torch.equal(served(IDS, AGES), before)
    assert served.refresh() == 2
    assert served(IDS, AGES).shape == (3, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "the number of arguments is 0, and 2 is allowed"),
        ((IDS,), "the number of arguments is 1, and 2 is allowed"),
        ((IDS, AGES, AGES), "the number of arguments is 3, and 2 is allowed"),
        (([1, 2, 3], AGES), "user is of type list"),
        (((IDS, IDS), AGES), "user is of type tuple"),
        ((None, AGES), "user is of type NoneType, which is no tensor"),
        ((IDS, 0.5), "age is of type float, which is no tensor"),
        ((IDS.numpy(), AGES), "user is of type ndarray, which is no tensor"),
        ((IDS[:, None], AGES), "user has the shape (3, 1)"),
        ((IDS, AGES[:, 0]), "age has the shape (3,)"),
        ((IDS, AGES.repeat(1, 2)), "age has the shape (3, 2) where n is 3"),
        ((IDS, AGES[:2]), "age has the shape (2, 1) where n is 3"),
        ((IDS.float(), AGES), "user has the dtype float32"),
        ((IDS, AGES.double()), "age has the dtype float64"),
        ((IDS.int(), AGES.double()), "age has the dtype float64"),
    ],
)
def test_a_call_with_other_arguments_is_told_what_the_program_takes(
    arguments: tuple[Any, ...], words: str, served: sr.ServedModel
) -> None:
    pulls = served.stats().pulls
    with pytest.raises(sr.errors.InvalidArgument) as caught:
        served(*arguments)
    takes = "user: int64 (n), age: float32 (n, 1)"
    assert str(caught.value) == f"ServedModel: {words}; the program takes {takes}"
    if "float64" not in words:  # a tower finds out itself, with the rows
        assert served.stats().pulls == pulls
    assert served(IDS, AGES).shape == (3, 4)


def test_a_call_that_fails_for_another_reason_is_told_that_reason(served: sr.ServedModel) -> None:
    assert served(IDS.int(), AGES).shape == (3, 4)
    with pytest.raises(sr.errors.InvalidArgument, match="1000") as caught:
        served(torch.tensor([1, 2, -1000]), AGES)
    assert "the program takes" not in str(caught.value)


def test_what_torch_alone_refuses_is_told_in_a_line() -> None:
    program = torch.export.export(Scale(), (AGES, 2))
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        program.module()(AGES, 3)
    error = error_of_call(program, (AGES, 3), caught.value)
    assert isinstance(error, sr.errors.InvalidArgument)
    assert str(error).startswith(f"ServedModel: the arguments do not fit ({caught.value}")
    assert str(error).endswith("; the program takes age: float32 (3, 1)")


def test_a_served_model_on_a_device_that_is_not_there(tmp_path: Path) -> None:
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "absent") as session:
        model = session.distribute(nn.Sequential(nn.Embedding(50, 4)), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.publish("m", root=str(tmp_path), model=model, example=(torch.zeros(2, dtype=torch.int64),))
    refused = pytest.raises(sr.errors.InvalidArgument, match=f"ServedModel.device: '{ABSENT}' is not allowed; ")
    with sr.local_serving("m", root=str(tmp_path)) as serving, sr.ServingClient(serving.addresses) as client, refused:
        sr.ServedModel(client, str(tmp_path), device=ABSENT)
