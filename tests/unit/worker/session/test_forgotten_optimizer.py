"""``session.step()`` without the dense optimizer: one warning, where dense weights have gradients and never move."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

STEPS = 20
IDS = torch.tensor([1, 2, 2, 7])
FORGOTTEN = r"session\.step: 'head\.bias' has a gradient, and no step has moved it.* call session\.step\(dense\)"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(40, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids))


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=1).connect("forgotten") as session:
        yield session


@pytest.fixture
def model(session: sr.Session) -> Net:
    return session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)


def warned(model: nn.Module, end: Callable[[int], object], steps: int = STEPS) -> list[warnings.WarningMessage]:
    """Returns the warnings of a loop of ``steps`` steps, each of which ``end`` ends."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(steps):
            (model(IDS) ** 2).mean().backward()
            end(number)
    return [each for each in found if "session.step" in str(each.message)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forgotten_optimizer_is_warned_of_once(session: sr.Session, model: Net, compiled: bool) -> None:
    called = torch.compile(model, backend="aot_eager") if compiled else model
    (warning,) = warned(called, lambda _: session.step())
    assert re.search(FORGOTTEN, str(warning.message))
    assert warning.filename == __file__


def test_no_warning_where_only_rows_are_trained(session: sr.Session, model: Net) -> None:
    model.head.requires_grad_(False)
    assert not warned(model, lambda _: session.step())


def test_no_warning_of_a_loop_that_steps_its_optimizer_itself(session: sr.Session, model: Net) -> None:
    """It does so after every fourth of the session's steps."""
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not warned(model, lambda number: (session.step(), number % 4 == 3 and dense.step()))


def test_no_warning_of_a_wrapped_optimizer(session: sr.Session, model: Net) -> None:
    optimizer = session.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not warned(model, lambda _: optimizer.step())


def test_no_warning_after_a_step_with_the_optimizer(session: sr.Session, model: Net) -> None:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not warned(model, lambda number: session.step(dense if number == 0 else None))


def test_no_warning_where_weights_are_moved_by_hand(session: sr.Session, model: Net) -> None:
    def end(_: int) -> None:
        session.step()
        for parameter in model.parameters():
            if parameter.grad is not None:  # as that of a layer on the servers
                parameter.data -= 0.1 * parameter.grad

    assert not warned(model, end)


def test_no_warning_where_the_dense_tensors_are_on_the_servers(session: sr.Session, model: Net) -> None:
    session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
    assert not warned(model, lambda _: session.step())


def test_the_optimizer_of_another_model_is_warned_of(session: sr.Session, model: Net) -> None:
    other = torch.optim.SGD(Net().parameters(), lr=0.1)
    (warning,) = warned(model, lambda _: session.step(other))
    assert re.search(
        r"'head\.bias' has a gradient.*as the one that was given has no weight of this model", str(warning.message)
    )
    assert warning.filename == __file__


def test_no_warning_where_the_optimizer_has_one_weight_of_several_models(session: sr.Session, model: Net) -> None:
    second = session.distribute(nn.ModuleDict({"two": nn.Embedding(40, 4)}), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
    dense = torch.optim.SGD([*Net().parameters(), model.head.bias], lr=0.1)
    assert not warned(model, lambda _: session.step(dense))
    assert list(second.state_dict())


def test_no_warning_where_the_model_has_tables_alone(session: sr.Session) -> None:
    tables = session.distribute(nn.ModuleDict({"two": nn.Embedding(40, 4)}), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
    head = nn.Linear(4, 1)
    dense = torch.optim.SGD(head.parameters(), lr=0.1)
    assert not warned(lambda ids: head(tables["two"](ids)), lambda _: session.step(dense))


def test_an_empty_batch_is_warned_of_once(session: sr.Session, model: Net) -> None:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            model(IDS[:0]).mean().backward()
            assert session.step(dense)
    (warning,) = [each for each in found if "session.step" in str(each.message)]
    assert re.search(r"no gradient of any row, as for an empty batch.*allow_empty=True", str(warning.message))
    assert warning.filename == __file__


def test_an_empty_step_that_is_allowed_is_not_warned_of(session: sr.Session, model: Net) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.step(allow_empty=True)
        model(IDS[:0]).sum().backward()
        session.step(torch.optim.SGD(model.parameters(), lr=0.1), allow_empty=True)
        model(IDS).sum().backward()
        session.step(torch.optim.SGD(model.parameters(), lr=0.1))
