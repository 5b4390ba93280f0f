"""The riskiest joint: op, autograd, compilers and the step, against shards in this process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparserow as sr

ROWS, DIM = 1000, 4
SGD = sr.optim.SGD(lr=0.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(ids), self.bag(bags)], dim=1)).squeeze(1)


@pytest.fixture
def cluster() -> sr.InProcessCluster:
    return sr.InProcessCluster(shards=2)


@pytest.fixture
def session(cluster: sr.InProcessCluster) -> Iterator[sr.Session]:
    with cluster.connect("joint") as session:
        yield session


def batch(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, ROWS, (size,), generator=generator),
        torch.randint(0, ROWS, (size, 3), generator=generator),
    )


def distributed(session: sr.Session, **options: object) -> Net:
    torch.manual_seed(3)
    return session.distribute(Net(), optimizer=SGD, min_rows=1, **options)  # type: ignore[arg-type]


def all_rows(session: sr.Session, name: str) -> np.ndarray:
    return session.table(name).pull(np.arange(ROWS))


def local(model_seed: int = 3) -> Net:
    torch.manual_seed(model_seed)
    return Net()


def local_step(model: Net, *batches: tuple[Tensor, Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()
    for one in batches:
        (model(*one) ** 2).mean().backward()
    optimizer.step()


def assert_equal_to(session: sr.Session, reference: Net) -> None:
    np.testing.assert_allclose(all_rows(session, "one"), reference.one.weight.detach(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(all_rows(session, "bag"), reference.bag.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("train", [True, False])
def test_opcheck(session: sr.Session, train: bool) -> None:
    model = distributed(session)
    ids, bags = batch(1)
    anchor = torch.zeros(1, requires_grad=True)
    torch.library.opcheck(torch.ops.sparserow.gather, (ids, anchor, model.one.binding, DIM, -1, train))
    weights = torch.rand(bags.shape, requires_grad=True)
    name = model.bag.binding
    for mode, per_sample in ((0, None), (0, weights), (1, None), (2, None)):
        torch.library.opcheck(
            torch.ops.sparserow.gather_bag,
            (bags, None, anchor, per_sample, name, DIM, mode, -1, False, train),
        )
    offsets = torch.tensor([0, 3, 3, 8])
    for last in (False, True):
        torch.library.opcheck(
            torch.ops.sparserow.gather_bag,
            (ids, offsets, anchor, None, name, DIM, 1, -1, last, train),
        )


def test_compile_fullgraph_trains_with_dynamic_shapes(session: sr.Session) -> None:
    """Traced forwards and backwards as for any compiler; the next test has inductor's code."""
    model, reference = distributed(session), local()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed, size in ((1, 8), (2, 5), (3, 13)):
        ids, bags = batch(seed, size)
        out = compiled(ids, bags)
        torch.testing.assert_close(out, reference(ids, bags), rtol=1e-6, atol=1e-6)
        (out**2).mean().backward()
        local_step(reference, (ids, bags))
        assert session.step(dense)
    assert_equal_to(session, reference)


def test_compile_keeps_both_of_two_equal_lookups(session: sr.Session) -> None:
    """Equal calls in one graph must not be merged: each brings its own gradient."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(ROWS, DIM)

        def forward(self, ids: Tensor) -> Tensor:
            return self.one(ids).sum() + self.one(ids).sum()

    model = session.distribute(Twice(), optimizer=sr.optim.SGD(lr=1.0), min_rows=1)
    before = all_rows(session, "one")
    torch.compile(model, fullgraph=True)(torch.tensor([5])).backward()
    session.step()
    np.testing.assert_allclose(all_rows(session, "one")[5], before[5] - 2, atol=1e-6)


def test_export_runs_and_follows_the_table(session: sr.Session) -> None:
    model = distributed(session).eval()
    ids, bags = batch(1)
    size = torch.export.Dim("size", min=2, max=1024)
    program = torch.export.export(model, (ids, bags), dynamic_shapes=({0: size}, {0: size}))
    other = batch(2, 11)
    torch.testing.assert_close(program.module()(*other), model(*other))
    session.table("one").assign(other[0].numpy(), np.full((11, DIM), 7, np.float32))
    torch.testing.assert_close(program.module()(*other), model(*other))


def test_checkpoint_recomputes_from_the_same_rows(session: sr.Session) -> None:
    model, reference = distributed(session), local()
    ids, bags = batch(4)
    out = checkpoint(model, ids, bags, use_reentrant=False)
    pulled = session.stats().rows_pulled
    session.table("one").assign(ids.numpy(), np.zeros((8, DIM), np.float32))  # nobody in this step sees it
    (out**2).mean().backward()
    assert session.stats().rows_pulled == pulled
    torch.testing.assert_close(out, reference(ids, bags), rtol=1e-6, atol=1e-6)
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    (reference(ids, bags) ** 2).mean().backward()
    torch.testing.assert_close(model.head.weight.grad, reference.head.weight.grad, rtol=1e-6, atol=1e-6)
    session.step(dense)


def test_micro_batches_accumulate(session: sr.Session) -> None:
    model, reference = distributed(session), local()
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        pair = (batch(5), batch(6, 4))
        for one in pair:
            (model(*one) ** 2).mean().backward()
        session.step(dense)
        local_step(reference, *pair)
    assert_equal_to(session, reference)


def test_a_reused_buffer_is_not_mistaken_for_the_same_ids(session: sr.Session) -> None:
    model, reference = distributed(session), local()
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    ids, bags = batch(8)
    first = (ids.clone(), bags.clone())
    (model(ids, bags) ** 2).mean().backward()
    second = batch(9)
    ids.copy_(second[0])
    bags.copy_(second[1])
    (model(ids, bags) ** 2).mean().backward()
    session.step(dense)
    local_step(reference, first, second)
    assert_equal_to(session, reference)


@pytest.mark.parametrize("culprit", ["sparse", "dense"])
def test_scaler_skip_moves_neither_side(session: sr.Session, culprit: str) -> None:
    model = distributed(session)
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    rows, head = all_rows(session, "one"), model.head.weight.detach().clone()
    ids, bags = batch(1)
    scaler.scale((model(ids, bags) ** 2).mean()).backward()
    if culprit == "dense":
        model.head.weight.grad.fill_(float("inf"))
    else:
        (model.one(ids).sum() * float("inf")).backward()
    assert not session.step(dense, scaler)
    assert scaler.get_scale() == 512.0
    np.testing.assert_array_equal(all_rows(session, "one"), rows)
    torch.testing.assert_close(model.head.weight.detach(), head, rtol=0, atol=0)

    reference = local()
    scaler.scale((model(ids, bags) ** 2).mean()).backward()
    assert session.step(dense, scaler)
    assert scaler.get_scale() == 1024.0
    local_step(reference, (ids, bags))
    assert_equal_to(session, reference)
    torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=1e-6, atol=1e-6)


def test_scaler_unscaled_early_for_clipping(session: sr.Session) -> None:
    model, reference = distributed(session), local()
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    one = batch(2)
    scaler.scale((model(*one) ** 2).mean()).backward()
    scaler.unscale_(dense)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert session.step(dense, scaler)
    local_step(reference, one)
    assert_equal_to(session, reference)
    torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=1e-6, atol=1e-6)


def test_nan_is_refused_and_the_session_goes_on(session: sr.Session) -> None:
    model, reference = distributed(session), local()
    dense = torch.optim.SGD(model.parameters(), lr=0.5)
    ids, bags = batch(1)
    rows, head = all_rows(session, "one"), model.head.weight.detach().clone()
    out = model.one(ids)
    out.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), float("nan")))
    (out.sum() + model.bag(bags).sum()).backward()
    with pytest.raises(sr.NonFiniteGradient, match=rf"table 'joint/one'.*key {int(ids[2])} .*refused"):
        session.step(dense)
    assert session.stats().nonfinite_rows == 1
    np.testing.assert_array_equal(all_rows(session, "one"), rows)
    torch.testing.assert_close(model.head.weight.detach(), head, rtol=0, atol=0)
    (model(ids, bags) ** 2).mean().backward()
    session.step(dense)
    local_step(reference, (ids, bags))
    assert_equal_to(session, reference)


def test_nan_is_skipped_when_asked(cluster: sr.InProcessCluster) -> None:
    with cluster.connect("skipping", on_nonfinite="skip") as session:
        model = distributed(session)
        rows = all_rows(session, "one")
        (model.one(torch.tensor([1])).sum() * float("nan")).backward()
        assert not session.step()
        np.testing.assert_array_equal(all_rows(session, "one"), rows)
        assert session.stats().steps_aborted == 1


def test_a_refusing_shard_leaves_everything_as_it_was() -> None:
    # 2,000 rows of 16 KiB (weights and state) are above the budget of 16 MiB a shard, three are not.
    cluster = sr.InProcessCluster(shards=2, memory_budget_bytes=16 << 20)
    with cluster.connect("refusing") as session:
        model = nn.Sequential(nn.Embedding(100_000, 2048, device="meta"), nn.Linear(2048, 1))
        session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.1), min_rows=10_000)
        dense = torch.optim.SGD(model.parameters(), lr=0.5)
        weight = model[1].weight.detach().clone()
        model(torch.arange(2000)).sum().backward()
        with pytest.raises(sr.errors.ResourceExhausted):
            session.step(dense)
        assert cluster.row_count("refusing", "0") == 0
        torch.testing.assert_close(model[1].weight.detach(), weight, rtol=0, atol=0)
        model(torch.arange(3)).sum().backward()
        assert session.step(dense)
        assert cluster.row_count("refusing", "0") == 3
        assert not torch.equal(model[1].weight, weight)


def test_step_needs_a_backward(session: sr.Session) -> None:
    model = distributed(session)
    with pytest.raises(sr.errors.FailedPrecondition, match="no backward reached"):
        session.step()
    model(*batch(1))
    with pytest.raises(sr.errors.FailedPrecondition, match="no backward reached"):
        session.step()
    assert session.step(allow_empty=True)
    assert session.current_step == 1


def test_backward_after_the_step_is_refused(session: sr.Session) -> None:
    model = distributed(session)
    ids, bags = batch(1)
    (model(ids, bags) ** 2).mean().backward()
    late = model.one(ids).sum()
    session.step()
    with pytest.raises(RuntimeError, match="call backward before"):
        late.backward()


def test_double_backward_is_refused(session: sr.Session) -> None:
    model = distributed(session)
    out = model.one(torch.tensor([1, 2]))
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad((out * scale).sum(), model.one.anchor, create_graph=True)


def test_schedulers_drive_the_sparse_rate(session: sr.Session) -> None:
    model = distributed(session)
    scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, step_size=1, gamma=0.1)
    rows = all_rows(session, "one")
    for factor in (1.0, 0.1):
        model.one(torch.tensor([3])).sum().backward()
        session.step()
        scheduler.step()
        after = all_rows(session, "one")
        np.testing.assert_allclose(after[3], rows[3] - 0.5 * factor, atol=1e-6)
        rows = after
    with pytest.raises(sr.errors.FailedPrecondition, match=r"session\.step"):
        session.optimizer.step()


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_the_sparse_optimizer_hear_of_each_step(session: sr.Session, register: str) -> None:
    model = distributed(session)
    heard: list[torch.optim.Optimizer] = []
    hook = getattr(session.optimizer, register)(lambda *given: heard.append(given[0]))
    for steps in (1, 2):
        model.one(torch.tensor([3])).sum().backward()
        session.step()
        assert heard == [session.optimizer] * steps
    hook.remove()
    model.one(torch.tensor([3])).sum().backward()
    session.step()
    assert len(heard) == 2


def test_a_scheduler_that_steps_after_the_session_is_not_warned(session: sr.Session) -> None:
    model = distributed(session)
    scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, step_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.one(torch.tensor([3])).sum().backward()
        session.step()
        scheduler.step()


@pytest.mark.parametrize(("ids", "bad"), [([1, -1], "-1"), ([0, ROWS], str(ROWS))])
def test_ids_out_of_range_are_named(session: sr.Session, ids: list[int], bad: str) -> None:
    model = distributed(session)
    for _ in range(2):  # traced, then pulled ahead
        with pytest.raises(sr.errors.InvalidArgument, match=rf"id of table 'joint/one': {bad} is not allowed"):
            model(torch.tensor(ids), torch.zeros(2, 3, dtype=torch.int64))


def test_float_ids_and_wrong_offsets_are_refused(session: sr.Session) -> None:
    model = distributed(session)
    with pytest.raises(sr.errors.InvalidArgument, match=r"ids\.dtype: 'Float' is not allowed"):
        model.one(torch.zeros(3))
    with pytest.raises(sr.errors.InvalidArgument, match=r"offsets\[1\]: 9 is not allowed"):
        model.bag(torch.tensor([1, 2]), torch.tensor([0, 9]))
    with pytest.raises(sr.errors.InvalidArgument, match="per_sample_weights"):
        model.bag(torch.tensor([[1, 2]]), None, torch.ones(3))


def test_an_unbound_table_says_so(session: sr.Session) -> None:
    model = distributed(session)
    session.close()
    with pytest.raises(sr.errors.FailedPrecondition, match="'joint/one' is not bound"):
        model(*batch(1))


def test_copies_share_the_table(session: sr.Session) -> None:
    model = distributed(session)
    duplicate, unpickled = sr.copy_sharing_rows(model), pickle.loads(pickle.dumps(model))
    for other in (duplicate, unpickled):
        torch.testing.assert_close(other(*batch(1)), model(*batch(1)))
    (duplicate(*batch(2)) ** 2).mean().backward()
    assert session.step()
    names = [name for name in model.state_dict() if "one" in name or "bag" in name]
    assert all(name.endswith("._extra_state") for name in names), "handles, no rows"
    assert model.to(torch.device("cpu")) is model
    full = [name for name, value in model.named_parameters() if value.numel() > 0]
    assert full == ["head.weight", "head.bias"]


def test_eval_reads_the_newest_rows_and_leaves_no_trace(session: sr.Session, cluster: sr.InProcessCluster) -> None:
    model = distributed(session).eval()
    with torch.no_grad():
        model(*batch(1))
        pulls = session.stats().pulls
        model(*batch(1))
        assert session.stats().pulls == pulls + 1  # merged
        session.table("one").assign(batch(1)[0].numpy(), np.ones((8, DIM), np.float32))
        torch.testing.assert_close(model.one(batch(1)[0]), torch.ones(8, DIM))
    assert session.stats().steps_committed == 0
