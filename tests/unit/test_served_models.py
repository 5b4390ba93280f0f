"""A served model whose next version, or whose call, is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sparserow as sr
import torch
from sparserow.proto.published.registry import ModelRegistry
from sparserow_process import wait_until
from torch import Tensor, nn

IDS = torch.tensor([1, 2, 3])
AGES = torch.tensor([[0.5], [0.25], [0.0]])


class User(nn.Module):
    """A table of users, and a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(50, 4)

    def forward(self, user: Tensor, age: Tensor) -> Tensor:
        return self.user(user) * age


class UserAndItem(User):
    """A model with one more table, which is read by the ids of users."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(50, 4)

    def forward(self, user: Tensor, age: Tensor) -> Tensor:
        return super().forward(user, age) + self.item(user)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Version 1 has the table ``user``, and version 2 has ``user`` and ``item``; no session is left."""
    folder = str(tmp_path_factory.mktemp("models"))
    with sr.local_cluster(shards=1) as cluster:
        for model in (User(), UserAndItem()):
            with sr.connect(cluster.address, "ads") as session:
                distributed = sr.distribute(model, session, optimizer=sr.SGD(lr=0.1), min_rows=1)
                sr.publish(session, "ctr", root=folder, model=distributed, example=(IDS, AGES))
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


def test_the_former_version_answers_when_a_table_of_the_next_one_cannot_be_bound(
    client: sr.ServingClient, root: str
) -> None:
    move(client, root, 1)
    with sr.ServedModel(client, root) as served:
        before = served(IDS, AGES)
        move(client, root, 2)
        with sr.InProcessCluster(shards=1).connect("ads") as session:
            sr.distribute(nn.ModuleDict({"item": nn.Embedding(50, 4)}), session, optimizer=sr.SGD(lr=0.1), min_rows=1)
            for _ in range(2):
                with pytest.raises(sr.FailedPrecondition, match="'ads/item' is already bound in this process"):
                    served.refresh()
                assert served.version == 1
                assert torch.equal(served(IDS, AGES), before)
        assert served.refresh() == 2
        assert served(IDS, AGES).shape == (3, 4)
