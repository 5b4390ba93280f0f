"""Weights of distributed layers that something else holds after ``distribute``."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM = 50, 4
IDS = torch.tensor([1, 2, 2, 7])


class Net(nn.Module):
    """As DeepCTR's models: a list of weights whose squares are added to the loss."""

    def __init__(self, *, regularised: bool) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.head = nn.Linear(DIM, 1)
        self.regularisation = [(list(self.one.parameters()), 1e-3)] if regularised else []

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids))

    def penalty(self) -> Tensor:
        return sum((rate * (w**2).sum() for weights, rate in self.regularisation for w in weights), torch.zeros(()))


@pytest.fixture
def session() -> Iterator[sr.Session]:
    session = sr.InProcessCluster().connect("stale")
    yield session
    session.discard()
    session.close()


def distributed(model: Net, session: sr.Session, weight_decay: float = 0.0) -> Net:
    return session.distribute(model, optimizer=sr.optim.SGD(lr=0.5, weight_decay=weight_decay), min_rows=1)


def test_a_list_of_weights_is_told_and_its_gradient_is_an_error(session: sr.Session) -> None:
    with pytest.warns(UserWarning, match=r"'one' are still in memory \(0.0 MB\), by the attribute 'regularisation'"):
        model = distributed(Net(regularised=True), session)
    with pytest.raises(sr.errors.FailedPrecondition, match=r"layer 'one': a gradient reached .* weight_decay"):
        (model(IDS).sum() + model.penalty()).backward()


def test_an_optimizer_that_was_made_before_is_told(session: sr.Session) -> None:
    model = Net(regularised=False)
    dense = torch.optim.Adam(model.parameters())
    with pytest.warns(UserWarning, match=r"an optimizer \(Adam\).*make optimizers after distribute"):
        distributed(model, session)
    model(IDS).sum().backward()
    assert session.step(dense)


def test_a_variable_is_told(session: sr.Session) -> None:
    model = Net(regularised=False)
    weight = model.one.weight
    with pytest.warns(UserWarning, match="are still in memory"):
        distributed(model, session)
    assert weight.grad is None


def test_a_model_that_nothing_else_holds_is_silent_and_its_memory_is_free(session: sr.Session) -> None:
    model = Net(regularised=False)
    kept = torch.zeros(ROWS, DIM)
    kept.copy_(model.one.weight.detach())
    weight = weakref.ref(model.one.weight)
    model.itself = [model]  # a circle of the author's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributed(model, session)
    gc.collect()
    assert weight() is None
    np.testing.assert_array_equal(session.table("one").pull(np.arange(ROWS)), kept)


def test_weight_decay_of_rows_is_the_penalty_of_the_rows_of_a_batch(session: sr.Session) -> None:
    """The gradient of rate * w**2 is 2 * rate * w."""
    torch.manual_seed(3)
    reference = Net(regularised=True)
    torch.manual_seed(3)
    model = distributed(Net(regularised=False), session, weight_decay=2e-3)
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    local = torch.optim.SGD(reference.parameters(), lr=0.5)
    model(IDS).sum().backward()
    (reference(IDS).sum() + reference.penalty()).backward()
    session.step(dense)
    local.step()
    keys = [1, 2, 7]
    np.testing.assert_allclose(session.table("one").pull(keys), reference.one.weight.detach()[keys], atol=1e-6)
