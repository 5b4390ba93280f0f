"""What an author may do to a distributed model by habit or mistake: each has a defined end."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr

ROWS, DIM = 50, 4
IDS = torch.tensor([1, 2, 2, 7])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids) + self.bag(ids[:, None]))


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("misuse") as session:
        yield session


def local() -> Net:
    torch.manual_seed(3)
    return Net()


def distributed(session: sr.Session) -> Net:
    return session.distribute(local(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)


def assert_rows(session: sr.Session, reference: Net, tolerance: float = 1e-6) -> None:
    for name, layer in (("one", reference.one), ("bag", reference.bag)):
        rows = session.table(name).pull(np.arange(ROWS))
        np.testing.assert_allclose(rows, layer.weight.detach().float(), rtol=tolerance, atol=tolerance)


def train(model: nn.Module, end: Callable[[torch.optim.Optimizer], object], backward: Callable[[Tensor], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    backward((model(IDS) ** 2).mean())
    end(optimizer)


def once(loss: Tensor) -> None:
    loss.backward()


def test_a_layer_in_eval_mode_within_a_model_in_train_mode_is_warned_of_once(session: sr.Session) -> None:
    model = distributed(session)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once(model(IDS).sum())
        session.step()
        model.eval()
        model(IDS)
        model.train()
        model.one.requires_grad_(False)  # its rows are kept on purpose
        model.one.eval()
        once(model(IDS).sum())
        session.step()
    model.one.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"table 'misuse/one': its layer is in eval mode within .* do not train"):
        once(model(IDS).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.step()
        once(model(IDS).sum())


def twice(loss: Tensor) -> None:
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def twice_retained(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("backward", [twice, twice_retained])
def test_two_backwards_of_a_graph_are_torchs(session: sr.Session, backward: Callable[[Tensor], None]) -> None:
    """Refused and counted once, or with retain_graph added up."""
    model, reference = distributed(session), local()
    train(model, session.step, backward)
    train(reference, lambda optimizer: optimizer.step(), backward)
    assert_rows(session, reference)
    torch.testing.assert_close(model.head.weight, reference.head.weight)


def test_a_second_backward_that_reaches_the_lookup_first_stages_nothing(session: sr.Session) -> None:
    model, reference = distributed(session), local()
    twice(model.one(IDS).sum())
    assert session.step()
    twice(reference.one(IDS).sum())
    torch.optim.SGD(reference.one.parameters(), lr=0.5).step()
    assert_rows(session, reference)


@pytest.mark.parametrize(
    ("move", "dtype", "tolerance"),
    [
        (nn.Module.double, torch.float64, 1e-6),
        (lambda model: model.to(torch.float64), torch.float64, 1e-6),
        (nn.Module.bfloat16, torch.bfloat16, 3e-2),  # plain torch's rows are rounded, too
        (lambda model: model.half().float(), torch.float32, 3e-3),
        (lambda model: model.to("cpu"), torch.float32, 1e-6),
    ],
    ids=["double", "to", "bfloat16", "and-back", "device"],
)
def test_a_model_moved_after_distribute(
    session: sr.Session, move: Callable[[Net], Net], dtype: torch.dtype, tolerance: float
) -> None:
    """Lookups follow the model's dtype; rows stay float32 where they are."""
    model, reference = distributed(session), move(local())
    assert move(model) is model
    assert model.one(IDS).dtype == model.bag(IDS[:, None]).dtype == model.head.weight.dtype == dtype
    train(model, session.step, once)
    train(reference, lambda optimizer: optimizer.step(), once)
    assert_rows(session, reference, tolerance)
    trained = session.table("one").pull([1, 2, 7])
    assert not np.allclose(trained, local().one.weight.detach()[[1, 2, 7]], atol=2 * tolerance)


def test_a_copied_or_pickled_model_trains_the_same_rows(session: sr.Session) -> None:
    """The dense weights are copies, the rows are not."""
    model = distributed(session)
    for other in (sr.copy_sharing_rows(model), pickle.loads(pickle.dumps(model))):
        before = session.table("one").pull([1])
        other(IDS).sum().backward()
        assert session.step()
        assert not np.array_equal(session.table("one").pull([1]), before)
        torch.testing.assert_close(model.one(IDS), other.one(IDS), rtol=0, atol=0)
        session.discard()
        assert other.head.weight is not model.head.weight


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_session_cannot_be_copied(session: sr.Session, make: Callable[[object], object]) -> None:
    with pytest.raises(sr.errors.FailedPrecondition, match="connect in each process"):
        make(session)


def test_a_row_norm_must_be_above_0(session: sr.Session) -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(sr.errors.InvalidArgument, match=r"clip_row_norm: .* is not allowed; allowed: > 0"):
            session.step(clip_row_norm=value)


def test_rows_clipped_as_numpy_does(session: sr.Session) -> None:
    """Repeated keys are summed first; a scaler's scale is taken off first; what is shorter stays."""
    model = distributed(session)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = session.table("one").pull(np.arange(ROWS)).astype(np.float64)
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 20, (64,), generator=random)
    weights = torch.randn(64, DIM, generator=random)
    scaler.scale((model.one(ids) * weights).sum()).backward()
    assert session.step(scaler=scaler, clip_row_norm=2.0)
    sums = np.zeros((ROWS, DIM))
    np.add.at(sums, ids.numpy(), weights.numpy().astype(np.float64))
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    wanted = before - 0.5 * sums * np.minimum(1.0, 2.0 / np.maximum(norms, 1e-9))
    np.testing.assert_allclose(session.table("one").pull(np.arange(ROWS)), wanted, atol=1e-6)
    assert session.stats().clipped_rows == int((norms > 2.0).sum()) > 0
    assert ((norms > 0) & (norms < 2.0)).any()


def test_two_sessions_over_one_process_do_not_take_each_others_commits_for_their_own() -> None:
    cluster = sr.InProcessCluster(shards=2)
    with cluster.connect("two") as one, cluster.connect("two") as two:
        one.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0))
        tables = [session.table("t") for session in (one, two)]
        keys, ones = np.arange(8), np.ones((8, 2), np.float32)
        for table in tables:
            table.push(keys, ones)
        assert (tables[0].pull(keys) == -2).all()
        for value, table in enumerate(tables):
            table.assign(keys, value * ones)
            assert (tables[0].pull(keys) == value).all()
        assert [table.delete(keys) for table in tables] == [8, 0]


def test_distribute_over_a_closed_session_says_that_it_is_closed() -> None:
    session = sr.InProcessCluster(shards=1).connect("closed")
    distributed(session)
    session.close()
    with pytest.raises(sr.errors.FailedPrecondition, match="session is closed"):
        distributed(session)


@pytest.mark.parametrize("lr", [-0.5, float("nan"), float("inf"), "0.5"])
def test_a_push_by_key_refuses_what_is_no_learning_rate(lr: object) -> None:
    with sr.InProcessCluster(shards=1).connect("rates") as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        before, keys = table.pull([1]), np.array([1], np.uint64)
        with pytest.raises(sr.errors.InvalidArgument, match=r"lr: .* is not allowed; allowed: a finite number >= 0"):
            table.push(keys, np.ones((1, DIM), np.float32), lr)
        np.testing.assert_array_equal(table.pull([1]), before)


def test_a_deep_copy_is_refused_because_it_would_follow(session: sr.Session) -> None:
    model = distributed(session)
    for make in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(
            sr.errors.FailedPrecondition, match=r"the copy would follow this model.*sr\.copy_sharing_rows"
        ):
            make(model)
    averaged = torch.optim.swa_utils.AveragedModel(model.head)
    averaged.update_parameters(model.head)
    assert torch.equal(averaged.module.weight, model.head.weight)
