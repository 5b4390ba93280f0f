"""The optimizer of a step: one that cannot step is refused before rows move, a late error says what it left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM = 40, 4
IDS = torch.tensor([1, 2, 2, 7])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids))


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        del closure
        raise ValueError("the state is lost")


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("dense") as session:
        yield session
        session.discard()


@pytest.fixture
def model(session: sr.Session) -> Net:
    return session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)


def rows(session: sr.Session) -> np.ndarray:
    return session.table("one").pull(np.arange(ROWS))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda model: model, r"session\.step\.dense: type: 'Net' is not allowed; allowed: torch\.optim\.Optimizer"),
        (lambda model: [torch.optim.SGD(model.parameters(), lr=0.5)], r"session\.step\.dense: type: 'list'"),
        (
            lambda model: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.5), 1),
            r"session\.step\.dense: type: 'StepLR'",
        ),
        (lambda model: torch.optim.LBFGS(model.parameters()), r"session\.step: LBFGS calls its closure"),
        (lambda model: torch.optim.SparseAdam(model.parameters()), r"session\.step: SparseAdam takes sparse gradients"),
    ],
    ids=["model", "list", "scheduler", "lbfgs", "sparse-adam"],
)
def test_what_cannot_step_is_refused_before_rows_move(
    session: sr.Session, model: Net, given: Callable[[Net], Any], words: str
) -> None:
    before, step, head = rows(session), session.current_step, model.head.weight.detach().clone()
    (model(IDS) ** 2).mean().backward()
    with pytest.raises(sr.errors.InvalidArgument, match=words):
        session.step(given(model))
    np.testing.assert_array_equal(rows(session), before)
    assert session.current_step == step
    assert session.step(torch.optim.SGD(model.parameters(), lr=0.5))  # the gradients of both sides are still there
    assert not np.array_equal(rows(session), before)
    assert not torch.equal(model.head.weight, head)


def test_the_optimizer_of_the_rows_is_refused_as_the_dense_one(session: sr.Session, model: Net) -> None:
    before = rows(session)
    (model(IDS) ** 2).mean().backward()
    with pytest.raises(sr.errors.InvalidArgument, match=r"session\.step: dense is session\.optimizer"):
        session.step(session.optimizer)
    np.testing.assert_array_equal(rows(session), before)


def test_a_wrapped_sparse_adam_is_refused_before_rows_move(session: sr.Session, model: Net) -> None:
    before, optimizer = rows(session), session.wrap(torch.optim.SparseAdam(model.parameters()))
    (model(IDS) ** 2).mean().backward()
    with pytest.raises(sr.errors.InvalidArgument, match="SparseAdam takes sparse gradients"):
        optimizer.step()
    np.testing.assert_array_equal(rows(session), before)


def test_sparse_adam_steps_sparse_gradients(session: sr.Session, model: Net) -> None:
    small = nn.Embedding(ROWS, DIM, sparse=True)
    before, dense = small.weight.detach().clone(), torch.optim.SparseAdam(small.parameters(), lr=0.1)
    (model.one(IDS) * small(IDS)).sum().backward()
    assert session.step(dense)
    assert not torch.equal(small.weight, before)


def plain(session: sr.Session, loss: Tensor, dense: torch.optim.Optimizer) -> None:
    loss.backward()
    session.step(dense)


def scaled(session: sr.Session, loss: Tensor, dense: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss).backward()
    session.step(dense, scaler)


def wrapped(session: sr.Session, loss: Tensor, dense: torch.optim.Optimizer) -> None:
    loss.backward()
    session.wrap(dense).step()


def wrapped_and_scaled(session: sr.Session, loss: Tensor, dense: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss).backward()
    scaler.step(session.wrap(dense, scaler=scaler))


@pytest.mark.parametrize("end", [plain, scaled, wrapped, wrapped_and_scaled])
def test_a_dense_step_that_fails_after_the_commit_says_that_rows_have_moved(
    session: sr.Session, model: Net, end: Callable[[sr.Session, Tensor, torch.optim.Optimizer], None]
) -> None:
    before, head = rows(session), model.head.weight.detach().clone()
    with pytest.raises(
        sr.errors.FailedPrecondition,
        match=r"the rows of step 0 were committed, and then Failing\.step\(\) raised ValueError: the state is lost; "
        "the dense weights were not updated.* restore a checkpoint, or go on",
    ) as raised:
        end(session, (model(IDS) ** 2).mean(), Failing(model.parameters(), lr=0.5))
    assert isinstance(raised.value.__cause__, ValueError)
    assert not np.array_equal(rows(session), before)
    assert torch.equal(model.head.weight, head)
    (model(IDS) ** 2).mean().backward()
    assert session.step(torch.optim.SGD(model.parameters(), lr=0.5))


def nothing(session: sr.Session) -> None:
    del session


@pytest.mark.parametrize(
    ("is_wrapped", "leave_out", "is_trained"),
    [(False, nothing, True), (False, sr.Session.discard, False), (True, nothing, False)],
    ids=["dense", "discard", "wrapped"],
)
def test_rows_of_a_batch_left_out_after_backward(
    session: sr.Session, model: Net, is_wrapped: bool, leave_out: Callable[[sr.Session], None], is_trained: bool
) -> None:
    """Only ``discard`` and a wrapped ``zero_grad`` drop them, as docs/train-your-model.md says."""
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer, before = session.wrap(dense) if is_wrapped else dense, rows(session)
    model(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    leave_out(session)
    model(torch.tensor([2])).sum().backward()
    assert session.step(optimizer)
    moved = (rows(session) != before).any(axis=1)
    assert moved[2]
    assert moved[1] == is_trained


def test_a_step_with_a_scaler_updates_it(session: sr.Session, model: Net) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(model(IDS).sum()).backward()
    assert session.step(torch.optim.SGD(model.parameters(), lr=0.5), scaler)
    assert scaler.get_scale() == 16.0
