"""Ids that a model or a loop changes in place: a lookup reads what they are now, on the host and on a device.

The reference is the model in plain torch, with the same weights, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.deploy.bench.counting_device import COUNTS, device

ROWS, DIM, BATCH = 60, 4, 5
PLACES = ["host", "device"]


class Wrapped(nn.Module):
    """Folds ids into the table's size, in place, before its lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Embedding(ROWS, DIM)
        self.table = nn.Embedding(ROWS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        ids.remainder_(7)
        return self.table(ids)


class Between(nn.Module):
    """Changes ids in place between two lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, DIM)
        self.second = nn.Embedding(ROWS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.first(ids)
        ids.add_(1)
        return rows + 10 * self.second(ids)


class Columns(nn.Module):
    """Changes one column of ids between two lookups of it, and a dense tensor of the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, DIM)
        self.second = nn.Embedding(ROWS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.first(ids[:, 0]) + 10 * self.second(ids[:, 1])
        ids[:, 1].mul_(2)
        return rows + 100 * self.second(ids[:, 1])


def vector(step: int) -> Tensor:
    return torch.arange(BATCH) + 10 + step


def matrix(step: int) -> Tensor:
    return torch.arange(2 * BATCH).view(BATCH, 2) + step


MODELS: list[tuple[type[nn.Module], Callable[[int], Tensor]]] = [
    (Wrapped, vector),
    (Between, vector),
    (Columns, matrix),
]
models = pytest.mark.parametrize(("kind", "make"), MODELS, ids=[kind.__name__ for kind, _ in MODELS])


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=1).connect("in-place") as session:
        yield session


def place(name: str) -> torch.device:
    return device() if name == "device" else torch.device("cpu")


def plain(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def distributed(session: sr.Session, kind: type[nn.Module], where: torch.device, lr: float = 0.0) -> nn.Module:
    return session.distribute(plain(kind), optimizer=sr.optim.SGD(lr=lr), min_rows=1, carry_weights=True).to(where)


def check(made: list[Tensor], kind: type[nn.Module], make: Callable[[int], Tensor]) -> None:
    reference = plain(kind)
    for step, rows in enumerate(made):
        torch.testing.assert_close(rows, reference(make(step)).detach(), msg=lambda text, at=step: f"step {at}: {text}")


@pytest.mark.parametrize(("depth", "named"), [(0, False), (1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("name", PLACES)
@models
def test_a_training_forward_reads_changed_ids(
    session: sr.Session, kind: type[nn.Module], make: Callable[[int], Tensor], name: str, depth: int, named: bool
) -> None:
    def names(ids: Tensor) -> dict[str, Tensor]:
        return {table: ids for table in ("first", "second", "table") if hasattr(model, table)}

    where = place(name)
    model = distributed(session, kind, where)
    batches: Iterable[Tensor] = [make(step) for step in range(4)]
    if depth > 0:
        there = None if name == "host" else where
        batches = session.prefetch(batches, depth=depth, device=there, ids=names if named else None)
    made = []
    for ids in batches:
        rows = model(ids.to(where))
        if kind is Wrapped:  # torch refuses a backward whose saved ids were changed after the lookup
            rows.sum().backward()
        session.step(allow_empty=True)
        made.append(rows.detach().cpu())
    assert len(made) == 4
    check(made, kind, make)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", PLACES)
@models
def test_an_evaluation_reads_changed_ids(
    session: sr.Session,
    kind: type[nn.Module],
    make: Callable[[int], Tensor],
    name: str,
    depth: int,
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    where = place(name)
    model = distributed(session, kind, where).eval()
    with mode():
        batches: Iterable[Tensor] = [make(step) for step in range(4)]  # in inference mode they have no version
        if depth > 0:
            batches = session.prefetch(batches, depth=depth, device=None if name == "host" else where)
        made = [model(ids.to(where)).cpu().clone() for ids in batches]
    assert len(made) == 4
    check(made, kind, make)


@pytest.mark.parametrize("name", PLACES)
def test_micro_batches_through_one_buffer_each_train_their_rows(session: sr.Session, name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, DIM)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    where = place(name)
    model = distributed(session, Net, where, lr=1.0)
    before = session.table("table").pull(list(range(4)))
    buffer = torch.empty(2, dtype=torch.int64).to(where)
    for step in range(3):
        for part in ([0, 1], [2, 3]):
            buffer.copy_(torch.tensor(part).to(where))
            (model(buffer) * (1 + part[0])).sum().backward()
        session.step()
        moved = before - session.table("table").pull(list(range(4)))
        expected = (step + 1) * torch.tensor([1.0, 1.0, 3.0, 3.0])
        torch.testing.assert_close(torch.as_tensor(moved)[:, 0], expected)


def test_a_dense_tensor_changed_in_place_leaves_the_ids_of_its_batch_known(session: sr.Session) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, DIM)

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            numbers, ids = batch
            return self.table(ids) * numbers.add_(1).unsqueeze(1)

    where = place("device")
    model = distributed(session, Net, where)
    batches = [(torch.rand(BATCH), vector(step)) for step in range(4)]
    copies = []
    for batch in session.prefetch(batches, depth=1, device=where):
        model(batch).sum().backward()
        session.step()
        copies.append(COUNTS.to_host)
        COUNTS.reset()
    assert copies[1:] == [1, 1, 1], COUNTS.log  # the gradients
