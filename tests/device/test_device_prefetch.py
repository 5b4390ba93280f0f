"""Prefetch to a device: batch and rows cross in one copy, rows that changed in a second one, gradients in one back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.deploy.bench.counting_device import COUNTS, device

DIM, ROWS, BATCH = 4, 60, 16


@dataclass
class Click:
    dense: Tensor
    ids: Tensor
    flat: Tensor
    offsets: Tensor
    labels: Tensor


def clicks(n: int) -> list[Click]:
    generator = torch.Generator().manual_seed(7)

    def one() -> Click:
        cuts = torch.sort(torch.randint(0, 40, (BATCH - 1,), generator=generator)).values
        return Click(
            torch.randn(BATCH, 3, generator=generator),
            torch.randint(0, ROWS, (BATCH, 40), generator=generator),
            torch.randint(0, ROWS, (40,), generator=generator),
            torch.cat([torch.zeros(1, dtype=torch.int64), cuts]),
            torch.rand(BATCH, generator=generator).round(),
        )

    return [one() for _ in range(n)]


class Net(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(tables))
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.head = nn.Linear(3 + DIM * (tables + 1), 1)

    def forward(self, click: Click) -> Tensor:
        rows = [table(click.ids[:, column]) for column, table in enumerate(self.tables)]
        return self.head(torch.cat([click.dense, *rows, self.bag(click.flat, click.offsets)], 1)).squeeze(1)


def ids_of(click: Click, tables: int) -> dict[str, Tensor]:
    return {**{f"tables.{t}": click.ids[:, t] for t in range(tables)}, "bag": click.flat}


def stay(click: Click) -> Sequence[Tensor]:
    return [click.ids, click.flat]


def distributed(session: sr.Session, tables: int, where: torch.device) -> Net:
    torch.manual_seed(0)
    model = session.distribute(Net(tables), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1, carry_weights=True)
    return model.to(where)


def train(session: sr.Session, model: Net, batches: Iterable[Click], after_step: Callable[[], None]) -> list[float]:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for click in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(model(click), click.labels)
        loss.backward()
        session.step(dense)
        losses.append(loss.detach())
        after_step()
    return [float(loss.cpu()) for loss in losses]


@pytest.mark.parametrize("tables", [1, 30])
@pytest.mark.parametrize("stays", [True, False], ids=["ids stay", "ids cross"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "learnt"])
def test_a_step_crosses_twice_and_once_back_whatever_the_tables(tables: int, stays: bool, named: bool) -> None:
    """At staleness 0: one copy ahead of the step, one of rows that earlier steps changed, one back, one wait."""
    steps, first = 12, 4  # the plan is learnt from the first batch
    cluster = sr.InProcessCluster(shards=2)
    with cluster.connect("host") as session:
        model = distributed(session, tables, torch.device("cpu"))
        expected = train(session, model, clicks(steps), lambda: None)
    seen: list[tuple[int, int, int]] = []
    with cluster.connect("there") as session:
        model = distributed(session, tables, device())
        batches = session.prefetch(
            clicks(steps),
            depth=2,
            device=device(),
            on_host=stay if stays else None,
            ids=(lambda click: ids_of(click, tables)) if named else None,
        )
        COUNTS.reset()
        losses = train(session, model, batches, lambda: seen.append((COUNTS.to_device, COUNTS.to_host, COUNTS.waits)))
        stats = session.stats()
    assert losses == expected
    assert stats.rows_deferred > 0
    there, back, waits = (last - early for last, early in zip(seen[-1], seen[first - 1], strict=True))
    assert there <= 2 * (steps - first), COUNTS.log
    assert back == steps - first, COUNTS.log
    assert waits == 0, COUNTS.log  # beyond the wait for what comes back
    if named:
        assert (seen[-1][0] <= 2 * steps, stats.lookups_missed) == (True, 0)


def test_batches_arrive_whole_and_ids_that_stay_are_the_very_tensors() -> None:
    given = clicks(3)
    with sr.InProcessCluster(shards=2).connect("whole") as session:
        distributed(session, 1, device())
        for click, batch in zip(given, session.prefetch(given, device=device(), on_host=stay), strict=True):
            assert batch.ids is click.ids
            assert torch.equal(batch.dense.cpu(), click.dense)
            assert torch.equal(batch.offsets.cpu(), click.offsets)
            session.discard()


def test_tensors_cannot_stay_where_nothing_crosses() -> None:
    with sr.InProcessCluster(shards=1).connect("nowhere") as session:
        distributed(session, 1, torch.device("cpu"))
        with pytest.raises(sr.errors.InvalidArgument, match=r"prefetch\.on_host"):
            session.prefetch(clicks(1), on_host=stay)
