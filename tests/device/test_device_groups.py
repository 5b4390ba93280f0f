"""A tensor group whose models are on a device: its ranks in turn, each of which gets what the leader has sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.deploy.bench.counting_device import COUNTS, device
from sparserow.worker.api.session import Session
from sparserow.worker.lookups.makers import same_batch
from sparserow.worker.session import tensor_group
from sparserow.worker.session.follower_core import FollowerCore
from sparserow.worker.session.session_parts import Placement
from sparserow.worker.session.tensor_group import TensorGroup

ROWS, DIM, STEPS = 40, 4, 5
HOST = torch.device("cpu")


class Wire:
    """The calls of ``torch.distributed`` of a group of two, of which one runs after the other."""

    def __init__(self) -> None:
        self.is_leader = True
        self.sent: deque[Any] = deque()
        self.told: dict[bool, list[list[float]]] = {True: [], False: []}
        self.broadcasts: list[torch.device] = []

    def broadcast(self, values: Tensor, **_: object) -> None:
        self.broadcasts.append(values.device)
        if self.is_leader:
            self.sent.append(values.detach().clone())
        else:
            values.copy_(self.sent.popleft())

    def broadcast_object_list(self, box: list[Any], **_: object) -> None:
        if self.is_leader:
            self.sent.append(list(box))
        else:
            box[:] = self.sent.popleft()

    def all_gather(self, parts: list[Tensor], values: Tensor, **_: object) -> None:
        assert values.device == HOST, "what the ranks compare goes by gloo"
        self.told[self.is_leader].append(values.tolist())
        for part in parts:
            part.copy_(values)

    def get_world_size(self, _: object) -> int:
        return 2

    def get_global_rank(self, _: object, rank: int) -> int:
        return rank

    def is_initialized(self) -> bool:
        return False


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire()
    monkeypatch.setattr(tensor_group, "dist", made)
    for module in (tensor_group, same_batch):
        monkeypatch.setattr(module, "collective_device", lambda: HOST)
    return made


class Net(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(tables))
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.top = nn.Linear(DIM * (tables + 1), 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        return self.top(torch.cat([*rows, self.bag(ids)], 1)).square().mean()


def steps_of(session: Session, tables: int, where: torch.device, *, ahead: bool = False) -> Iterator[float]:
    torch.manual_seed(2)
    model = session.distribute(Net(tables), optimizer=sr.optim.Adagrad(lr=0.2), min_rows=1).to(where)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    given = [
        torch.randint(0, ROWS, (6, tables), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)
    ]
    for ids in session.prefetch(given, 2, device=where) if ahead else given:
        loss = model(ids)
        loss.backward()
        assert session.step(dense)
        yield float(loss.detach().cpu())


def follower(group: TensorGroup) -> Session:
    return Session(FollowerCore(group, Placement(namespace="group"), first_step=0, origins=[""]))


def leader(group: TensorGroup) -> Session:
    session = sr.InProcessCluster(shards=2).connect("group")
    session.core.tensor_group = group
    return session


def in_turn(wire: Wire, tables: int, seen: Callable[[int], None], *, ahead: bool = False) -> list[float]:
    """The losses of the leader, which the follower has as well; ``seen`` is called after each step of the leader."""
    losses = []
    with leader(TensorGroup("the group", 0)) as leading, follower(TensorGroup("the group", 1)) as following:
        runs = [steps_of(session, tables, device(), ahead=ahead) for session in (leading, following)]
        for step in range(STEPS):
            COUNTS.reset()
            wire.broadcasts.clear()
            wire.is_leader = True
            losses.append(next(runs[0]))
            seen(step)
            wire.is_leader = False
            assert next(runs[1]) == losses[-1]
            assert not wire.sent, "the follower takes all that the leader sends"
    return losses


@pytest.mark.parametrize("ahead", [False, True], ids=["pulled in the forward", "prefetched"])
def test_ranks_of_a_group_train_on_a_device_as_one_does_on_the_host(wire: Wire, ahead: bool) -> None:
    with sr.InProcessCluster(shards=2).connect("alone") as session:
        wanted = list(steps_of(session, 3, HOST))
    assert in_turn(wire, 3, lambda _: None, ahead=ahead) == pytest.approx(wanted, rel=1e-6)
    assert wire.told[True] == wire.told[False], "batches, plans and gradients of the ranks"
    assert set(wire.broadcasts) == {device()}, "rows go from device to device"


def test_what_crosses_in_a_step_of_the_leader_does_not_grow_with_the_tables(wire: Wire) -> None:
    counts: dict[int, tuple[int, ...]] = {}

    def seen(step: int, tables: int) -> None:
        if step == STEPS - 1:
            counts[tables] = (len(wire.broadcasts), COUNTS.to_device, COUNTS.to_host, COUNTS.waits)

    for tables in (2, 8):
        in_turn(wire, tables, lambda step, tables=tables: seen(step, tables))
    assert counts[2] == counts[8]
    assert counts[2][0] == 1, "one broadcast"
