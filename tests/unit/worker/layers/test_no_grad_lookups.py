"""Lookups in train mode without gradient: they read by the clock of the open step, and what they keep is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparserow as sr

ROWS, DIM = 4000, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids) + self.bag(ids[:, None] + 0))  # the bag's ids are not found ahead


@pytest.fixture
def cluster() -> sr.InProcessCluster:
    return sr.InProcessCluster(shards=2)


def distributed(session: sr.Session) -> Net:
    torch.manual_seed(3)
    return session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)


def batches(count: int, size: int = 40) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randint(0, ROWS, (size,), generator=random)


def plain(model: Net, ids: Tensor) -> Tensor:
    return model(ids)


def recomputed(model: Net, ids: Tensor) -> Tensor:
    """Reentrant checkpointing runs the forward without gradient, and again with it in backward."""
    flag = torch.ones(1, requires_grad=True)
    return checkpoint(lambda ids, _: model(ids), ids, flag, use_reentrant=True)


def recomputed_around_a_layer(model: Net, ids: Tensor) -> Tensor:
    flag = torch.ones(1, requires_grad=True)
    bag = checkpoint(lambda ids, _: model.bag(ids[:, None]), ids, flag, use_reentrant=True)
    return model.head(model.one(ids) + bag)


def beside_a_teacher(model: Net, ids: Tensor) -> Tensor:
    with torch.no_grad():
        taught = model(ids)
        model(torch.flip(ids, [0])[: len(ids) // 2] // 2)  # other rows, as negative samples
    loss = model(ids)
    torch.testing.assert_close(taught, loss.detach(), rtol=0, atol=0)
    return loss


def train(
    forward: Callable[[Net, Tensor], Tensor], *, micro_batches: int, no_grad_bytes: int = 128 << 20
) -> tuple[np.ndarray, np.ndarray]:
    cluster = sr.InProcessCluster(shards=2)
    with cluster.connect("net", no_grad_bytes=no_grad_bytes) as session:
        model = distributed(session)
        dense = torch.optim.SGD(model.parameters(), lr=0.5)
        for number, ids in enumerate(batches(2 * micro_batches)):
            ((forward(model, ids) ** 2).mean() / micro_batches).backward()
            if number % micro_batches == micro_batches - 1:
                assert session.step(dense)
        keys = np.arange(ROWS)
        return session.table("one").pull(keys), session.table("bag").pull(keys)


@pytest.mark.parametrize("no_grad_bytes", [128 << 20, 0])
@pytest.mark.parametrize("micro_batches", [1, 100])
@pytest.mark.parametrize("forward", [recomputed, recomputed_around_a_layer, beside_a_teacher])
def test_training_is_what_it_is_without(
    forward: Callable[[Net, Tensor], Tensor], micro_batches: int, no_grad_bytes: int
) -> None:
    """Also where nothing is kept, and recomputation reads each row again by the same clock."""
    found = train(forward, micro_batches=micro_batches, no_grad_bytes=no_grad_bytes)
    wanted = train(plain, micro_batches=micro_batches)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("prefetched", [False, True])
def test_an_evaluation_that_forgot_eval_keeps_no_more_than_its_bound(
    cluster: sr.InProcessCluster, scope: Callable[[], torch.no_grad], prefetched: bool
) -> None:
    bound = 200 * DIM * 4
    with cluster.connect("net", no_grad_bytes=bound) as session:
        model = distributed(session)
        wanted = model.one(torch.arange(ROWS)).detach()
        session.discard()
        for around in (True, False):
            loader = list(batches(60))
            source = session.prefetch(loader, depth=2) if prefetched else loader
            most = 0
            with scope() if around else torch.enable_grad():
                for ids in source:
                    with scope():
                        model(ids)
                        torch.testing.assert_close(model.one(ids), wanted[ids], rtol=0, atol=0)
                    most = max(most, *session.core.native.rows_in_step)
            assert most < 1000, "of the 1,800 rows or so of each table that were read"


def test_a_compiled_evaluation_is_bounded_too(cluster: sr.InProcessCluster) -> None:
    with cluster.connect("net", no_grad_bytes=200 * DIM * 4) as session:
        model = distributed(session)
        compiled = torch.compile(model, backend="aot_eager")
        dense = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            compiled(torch.arange(40)).sum().backward()
            assert session.step(dense)
            with torch.no_grad():
                for ids in batches(30):
                    torch.testing.assert_close(compiled(ids), model.eval()(ids))
                    model.train()
            with_gradient, without = session.core.native.rows_in_step
            assert with_gradient == 0
            assert 0 < without < 1000


def test_rows_with_gradient_are_those_that_were_read_without(cluster: sr.InProcessCluster) -> None:
    """Within a step a row that is kept does not change, whoever writes meanwhile, in either order of lookups."""
    ids = torch.arange(10)
    with cluster.connect("net", staleness=None) as session, cluster.connect("net") as other:
        model = distributed(session)
        for first, then in ((torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad)):
            with first():
                before = model.one(ids).detach()
            keys = np.arange(10)
            other.table("one").assign(keys, other.table("one").pull(keys) + 1)
            with then():
                torch.testing.assert_close(model.one(torch.arange(20))[:10].detach(), before, rtol=0, atol=0)
            session.discard()
            assert session.core.native.rows_in_step == (0, 0)
            torch.testing.assert_close(model.one(ids).detach(), before + 1)
            session.discard()


@pytest.mark.parametrize("cache", [None, sr.RowCache(bytes=1 << 20)])
def test_without_a_clock_they_are_read_again_after_a_time(
    cluster: sr.InProcessCluster, cache: sr.RowCache | None
) -> None:
    ids = torch.arange(10)
    with (
        cluster.connect("net", staleness=None, cache=cache, no_grad_sec=2.0) as session,
        cluster.connect("net") as other,
        torch.no_grad(),
    ):
        model = distributed(session)
        before = model.one(ids)
        keys = np.arange(10)
        other.table("one").assign(keys, other.table("one").pull(keys) + 1)
        torch.testing.assert_close(model.one(ids), before, rtol=0, atol=0)
        time.sleep(2.1)
        torch.testing.assert_close(model.one(ids), before + 1)


def test_a_lookup_without_gradient_stages_nothing_and_moves_no_clock(cluster: sr.InProcessCluster) -> None:
    with cluster.connect("net") as session:
        model = distributed(session)
        with torch.no_grad():
            model(torch.arange(10))
        assert session.current_step == 0
        with pytest.raises(sr.errors.FailedPrecondition, match="no backward reached"):
            session.step()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"no_grad_bytes": -1}, r"no_grad_bytes: -1 is not allowed; allowed: \[0"),
        ({"no_grad_sec": 1.0}, "no effect at staleness 0"),
        ({"no_grad_sec": 0.0, "staleness": 2}, "no_grad_sec: 0.0 is not allowed; allowed: >= 0.001"),
    ],
)
def test_bounds_that_cannot_be_are_refused(cluster: sr.InProcessCluster, arguments: dict, words: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=words):
        cluster.connect("net", **arguments)
