"""``dense_on_servers`` over stores of this process: the model trains as with torch's own optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.worker.layers.dense_rows import MARKER_KEY

ROWS, DIM = 50, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.tower = nn.Sequential(nn.Linear(DIM, 33), nn.ReLU(), nn.Linear(33, 1))
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.table(ids)).squeeze(1)


def make_net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net()


def ids_of(step: int) -> Tensor:
    return torch.randint(0, ROWS, (16,), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return ((model(ids_of(step)) - 1) ** 2).mean()


OPTIMIZERS = {
    "sgd": (sr.optim.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adagrad": (sr.optim.Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": (sr.optim.Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_torch(name: str, shards: int) -> None:
    ours, theirs = OPTIMIZERS[name]
    reference = make_net()
    optimizers = [torch.optim.SGD(reference.table.parameters(), lr=0.5)]
    optimizers += [theirs([*reference.tower.parameters(), *reference.unused.parameters()])]
    with sr.InProcessCluster(shards=shards).connect(f"dense-{name}-{shards}") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
        session.dense_on_servers(model, optimizer=ours)
        for step in range(20):
            loss, expected = loss_of(model, step), loss_of(reference, step)
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
            loss.backward()
            assert session.step()
            assert all(p.grad is None for p in model.parameters())
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        torch.testing.assert_close(loss_of(model, 99), loss_of(reference.eval(), 99), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.unused.weight, reference.unused.weight, rtol=0, atol=0)
        assert session.stats().steps_committed == 20
        assert session.stats().lookups_missed == 0
        # Every step: dense rows and the table's in one commit each, two pulls.
        assert session.stats().pulls <= 2 * 20 + 3


def test_micro_batches_see_the_same_parameters_and_sum() -> None:
    reference = make_net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with sr.InProcessCluster().connect("dense-micro") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        for step in range(5):
            for part in range(3):
                loss_of(model, 3 * step + part).backward()
                loss_of(reference, 3 * step + part).backward()
            assert session.step()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(loss_of(model, 99), loss_of(reference, 99), rtol=1e-5, atol=1e-6)


def test_the_rate_is_the_sessions() -> None:
    with sr.InProcessCluster().connect("dense-rate") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        before = [p.detach().clone() for p in model.parameters()]
        for group in session.optimizer.param_groups:
            group["lr"] = 0.0
        loss_of(model, 0).backward()
        session.step()
        model.eval()
        loss_of(model, 0)
        for now, then in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(now.detach(), then, rtol=0, atol=0)


def test_values_are_given_once() -> None:
    cluster = sr.InProcessCluster()
    with cluster.connect("dense-once") as session:
        model = make_net()
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        loss_of(model, 0).backward()
        session.step()
        model.eval()
        loss_of(model, 0)
        trained = model.tower[0].weight.detach().clone()
    with cluster.connect("dense-once") as session:
        other = make_net(seed=2)
        dense = session.dense_on_servers(other, optimizer=sr.optim.SGD(lr=0.1))
        torch.testing.assert_close(other.tower[0].weight.detach(), trained, rtol=0, atol=0)
        assert dense.table.pull(np.array([MARKER_KEY], np.uint64)).all()
        with pytest.raises(sr.errors.FailedPrecondition, match="this session has the dense tensors of a model"):
            session.dense_on_servers(make_net(), optimizer=sr.optim.SGD(lr=0.1))
    another = pytest.raises(sr.errors.FailedPrecondition, match="holds the parameters of another model")
    with cluster.connect("dense-once") as session, another:
        session.dense_on_servers(nn.Linear(3, 3), optimizer=sr.optim.SGD(lr=0.1))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    with sr.InProcessCluster(shards=2).connect("dense-nan") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        before = loss_of(model, 0)
        before.backward()
        with torch.no_grad():
            model.tower[0].bias.grad[3] = float("inf")
        with pytest.raises(sr.NonFiniteGradient, match="table 'dense-nan/dense'"):
            session.step()
        after = loss_of(model, 0)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        after.backward()
        assert session.step()


def test_what_is_refused() -> None:
    with sr.InProcessCluster().connect("dense-refused") as session:
        with pytest.raises(sr.errors.InvalidArgument, match="no parameters besides its tables"):
            session.dense_on_servers(nn.ReLU(), optimizer=sr.optim.SGD())
        with pytest.raises(
            sr.errors.InvalidArgument, match=r"'weight' is torch.bfloat16 on cpu; allowed: float32 on cpu"
        ):
            session.dense_on_servers(nn.Linear(2, 2).bfloat16(), optimizer=sr.optim.SGD())
        model = make_net()
        session.dense_on_servers(model, optimizer=sr.optim.SGD())
        loss_of(model, 0).backward()
        with pytest.raises(sr.errors.InvalidArgument, match="the dense tensors are on the servers"):
            session.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_evaluation_within_a_step_loses_no_gradient() -> None:
    reference = make_net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    with sr.InProcessCluster(shards=1).connect("dense-eval-within") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        for step in range(3):
            loss_of(reference, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            model.eval()
            with torch.no_grad():
                model(ids_of(step))
            model.train()
            session.step()
        model.eval()
        torch.testing.assert_close(loss_of(model, 9), loss_of(reference, 9), rtol=1e-5, atol=1e-6)


def _load(model: Net) -> None:
    model.load_state_dict(make_net(seed=5).state_dict(), strict=False)


def _edit(model: Net) -> None:
    with torch.no_grad():
        model.tower[0].weight.mul_(2)


def _replace(model: Net) -> None:
    model.tower[0].weight.data = torch.zeros(33, DIM)


def _step_locally(model: Net) -> None:
    model.tower[0].weight.grad = torch.ones(33, DIM)
    torch.optim.SGD(model.tower.parameters(), lr=0.1).step()


@pytest.mark.parametrize("change", [_load, _edit, _replace, _step_locally])
@pytest.mark.parametrize("train", [True, False])
def test_a_parameter_that_was_changed_here_is_refused_by_name(change, train: bool) -> None:
    with sr.InProcessCluster(shards=1).connect("changed") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        loss_of(model, 0).backward()
        assert session.step()
        model.train(train)
        loss_of(model, 1)
        change(model)
        with pytest.raises(
            sr.errors.FailedPrecondition, match=r"'tower.0.weight' was changed in this process.*'changed/dense'"
        ):
            loss_of(model, 1)


def test_a_parameter_frozen_later_stays_and_goes_on_after() -> None:
    with sr.InProcessCluster(shards=1).connect("later") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        for step, trains in enumerate((True, False, False, True)):
            model.tower[0].requires_grad_(trains)
            loss_of(model, step)
            before = model.tower[0].weight.detach().clone()
            loss_of(model, step).backward()
            assert session.step()
            model.eval()
            loss_of(model, step)
            assert torch.equal(model.tower[0].weight, before) is not trains
            model.train()


def test_a_parameter_that_was_frozen_before_is_not_trained_silently() -> None:
    with sr.InProcessCluster(shards=1).connect("before") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
        model.tower[0].requires_grad_(False)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        model.tower[0].weight.data.mul_(2)  # it is this process's own
        loss_of(model, 0).backward()
        assert session.step()
        model.tower[0].requires_grad_(True)
        with pytest.raises(
            sr.errors.FailedPrecondition, match=r"'tower.0.weight' requires a gradient now and was frozen when"
        ):
            loss_of(model, 1)
        model.eval()
        loss_of(model, 1)
