"""An optimizer that steps in place of ``session.step``: rows are trained, or an error says that they are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM = 40, 4
IDS = torch.tensor([1, 2, 2, 7])
REFUSED = r"SGD.step\(\) moved the dense parameters .* call session.step\(optimizer\) in its place"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids))


@pytest.fixture
def session() -> Iterator[sr.Session]:
    session = sr.InProcessCluster(shards=2).connect("lone")
    yield session
    if not session.core.native.is_closed:
        session.discard()
        session.close()


def distributed(session: sr.Session) -> Net:
    torch.manual_seed(3)
    return session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def backward(model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
    loss = (model(IDS) ** 2).mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def rows(session: sr.Session) -> np.ndarray:
    return session.table("one").pull(np.arange(ROWS))


def test_the_next_lookup_for_training_raises(session: sr.Session) -> None:
    model = distributed(session)
    dense, before = sgd(model), rows(session)
    backward(model)
    dense.step()
    with torch.no_grad():
        model.eval()(IDS)  # it reads, and trains nothing
    with pytest.raises(sr.errors.FailedPrecondition, match=REFUSED):
        model.train()(IDS)
    assert session.step(dense), "the rows' gradients are there still"
    assert not np.array_equal(rows(session), before)
    backward(model)
    assert session.step(dense)


def test_a_lookup_of_a_compiled_model_raises(session: sr.Session) -> None:
    model = distributed(session)
    dense = sgd(model)
    compiled = torch.compile(model, backend="aot_eager")
    backward(compiled)
    dense.step()
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(IDS)


def test_discard_drops_the_gradients_and_the_step_goes_on(session: sr.Session) -> None:
    model = distributed(session)
    dense, before = sgd(model), rows(session)
    backward(model)
    dense.step()
    session.discard()
    np.testing.assert_array_equal(rows(session), before)
    backward(model)
    assert session.step(dense)


def test_close_raises_and_closes(session: sr.Session) -> None:
    model = distributed(session)
    backward(model)
    sgd(model).step()
    with pytest.raises(sr.errors.FailedPrecondition, match=REFUSED):
        session.close()
    assert session.core.native.is_closed
    session.close()


def test_an_error_that_ends_the_block_is_not_hidden() -> None:
    def fails() -> None:
        with sr.InProcessCluster().connect("lone") as session:
            model = distributed(session)
            backward(model)
            sgd(model).step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


def test_gradients_of_an_open_step_are_dropped_with_a_warning(
    session: sr.Session, caplog: pytest.LogCaptureFixture
) -> None:
    backward(distributed(session))
    with caplog.at_level(logging.WARNING):
        session.close()
    assert "the gradients of 1 calls of backward are lost" in caplog.text


def itself(model: Net) -> nn.Module:
    return model


def a_copy(model: Net) -> nn.Module:
    clone = sr.copy_sharing_rows(model)
    backward(clone)
    return clone


def around(model: Net) -> nn.Module:
    return nn.Sequential(model, nn.Linear(1, 1))


@pytest.mark.parametrize("owner", [itself, a_copy, around])
def test_whatever_holds_its_parameters_counts(session: sr.Session, owner: Callable[[Net], nn.Module]) -> None:
    model = distributed(session)
    backward(model)
    module = owner(model)
    sgd(module).step()
    with pytest.raises(sr.errors.FailedPrecondition, match=REFUSED):
        model(IDS)


def test_embeddings_alone_are_distributed(session: sr.Session) -> None:
    """No parameter is theirs, so an optimizer with gradients counts until the session has stepped one."""
    model = Net()
    tables = nn.ModuleDict({"one": model.one})
    with pytest.warns(UserWarning, match="by the attribute 'one' of Net"):
        session.distribute(tables, optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
    model.one = tables["one"]
    dense = sgd(model)
    backward(model)
    dense.step()
    with pytest.raises(sr.errors.FailedPrecondition, match=REFUSED):
        model(IDS)
    assert session.step(dense)
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    backward(model)
    sgd(other).step()
    backward(model)  # an optimizer of another model
    assert session.step(dense)


def test_right_loops_are_silent(session: sr.Session) -> None:
    model, other = distributed(session), nn.Linear(2, 1)
    first = torch.optim.SGD([model.head.bias], lr=0.5)
    last = torch.optim.SGD([model.head.weight], lr=0.5)
    unrelated = sgd(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):  # two optimizers, of which session.step takes the last
        backward(model)
        first.step()
        assert session.step(last)
    for _ in range(3):  # a scaler that is told
        backward(model, scaler)
        scaler.unscale_(last)
        assert session.step(last, scaler)
    for _ in range(3):  # accumulation beside another model's training
        for _ in range(4):
            backward(model)
            other(torch.ones(1, 2)).sum().backward()
            unrelated.step()
        assert session.step(last)
    for _ in range(3):  # first the session, then another optimizer of the model
        backward(model)
        assert session.step(last)
        first.step()
    session.close()


def test_a_scaler_that_steps_the_dense_side_alone_is_noticed(session: sr.Session) -> None:
    model = distributed(session)
    scaler, dense = torch.amp.GradScaler("cpu", init_scale=8.0), sgd(model)
    backward(model, scaler)
    scaler.step(dense)
    scaler.update()
    with pytest.raises(sr.errors.FailedPrecondition, match=REFUSED):
        model(IDS)


def trained(loop: Callable[[Net, sr.Session], None]) -> tuple[np.ndarray, Tensor]:
    with sr.InProcessCluster(shards=2).connect("loops") as session:
        model = distributed(session)
        loop(model, session)
        return rows(session), model.head.weight.detach()


def plain(model: Net, session: sr.Session) -> None:
    dense = sgd(model)
    for _ in range(3):
        backward(model)
        session.step(dense)


def wrapped(model: Net, session: sr.Session) -> None:
    optimizer = session.wrap(sgd(model))
    assert isinstance(optimizer, torch.optim.Optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def by_closure(model: Net, session: sr.Session) -> None:
    optimizer = session.wrap(sgd(model))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(IDS) ** 2).mean()
        loss.backward()
        return loss

    with torch.no_grad():
        assert all(optimizer.step(closure) > 0 for _ in range(3))


def given_to_the_session(model: Net, session: sr.Session) -> None:
    optimizer = session.wrap(sgd(model))
    for _ in range(3):
        backward(model)
        session.step(optimizer)


def scaled(model: Net, session: sr.Session) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = session.wrap(sgd(model), scaler=scaler)
    for number in range(3):
        backward(model, scaler)
        if number == 1:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def with_batches_that_are_dropped(model: Net, session: sr.Session) -> None:
    """zero_grad() after a backward drops the rows' gradients, and the rows of the next forward stay."""
    optimizer = session.wrap(sgd(model))
    for _ in range(3):
        backward(model)
        loss = (model(IDS) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [wrapped, by_closure, given_to_the_session, scaled, with_batches_that_are_dropped])
def test_a_loop_that_steps_a_wrapped_optimizer_trains_as_one_that_calls_session_step(
    loop: Callable[[Net, sr.Session], None],
) -> None:
    (rows_of_loop, head_of_loop), (wanted, head) = trained(loop), trained(plain)
    np.testing.assert_allclose(rows_of_loop, wanted, atol=1e-6)
    torch.testing.assert_close(head_of_loop, head)


def test_a_wrapped_step_that_is_not_finite_moves_neither_side(session: sr.Session) -> None:
    model = distributed(session)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = session.wrap(sgd(model), scaler=scaler)
    before, head = rows(session), model.head.weight.detach().clone()
    scaler.scale((model.one(IDS) * float("inf")).sum()).backward()  # of the rows alone
    model.head.weight.grad, model.head.bias.grad = torch.ones_like(model.head.weight), torch.ones(1)
    scaler.step(optimizer)
    scaler.update()
    np.testing.assert_array_equal(rows(session), before)
    torch.testing.assert_close(model.head.weight.detach(), head, rtol=0, atol=0)
    assert scaler.get_scale() == 512.0


def test_a_scaler_that_wrap_was_not_given_is_refused(session: sr.Session) -> None:
    model = distributed(session)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), session.wrap(sgd(model))
    backward(model, scaler)
    with pytest.raises(sr.errors.InvalidArgument, match="pass it"):
        scaler.step(optimizer)


def test_schedulers_and_states_are_those_of_the_dense_optimizer(session: sr.Session) -> None:
    model = distributed(session)
    dense = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer = session.wrap(dense)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    backward(model)
    optimizer.step()
    schedule.step()
    assert dense.param_groups[0]["lr"] == pytest.approx(0.05)
    state = optimizer.state_dict()
    assert all(each["momentum_buffer"] is not None for each in state["state"].values())
    assert len(state["state"]) == sum(parameter.numel() > 0 for parameter in model.parameters())
    optimizer.load_state_dict(state)
    assert optimizer.param_groups is dense.param_groups
    assert optimizer.state is dense.state


def test_what_cannot_be_wrapped_is_refused(session: sr.Session) -> None:
    dense = sgd(distributed(session))
    lbfgs = torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])
    for given, words in (
        ("adam", "session.wrap.dense: type: 'str' is not allowed"),
        (session.wrap(dense), "is wrapped already, or is session.optimizer"),
        (session.optimizer, "is wrapped already, or is session.optimizer"),
        (lbfgs, "LBFGS calls its closure"),
    ):
        with pytest.raises(sr.errors.InvalidArgument, match=words):
            session.wrap(given)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(sr.errors.InvalidArgument, match=r"scaler.step\(optimizer\)"):
        session.step(session.wrap(dense), scaler)
