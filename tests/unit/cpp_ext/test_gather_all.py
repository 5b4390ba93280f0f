"""``gather_all``: all lookups of a forward by one op, which gives what an op a table gives; alone and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import sparserow as sr
from sparserow.cpp_ext import torch_ops as ops

ROWS, DIM = 40, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(ROWS, DIM, padding_idx=3), nn.Embedding(ROWS, 3)
        self.sum = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=3)
        self.max = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4 * DIM + 3, 1)

    def forward(self, ids: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
        weights = self.scale.expand(ids.shape[0], 3)
        parts = [self.one(ids[:, 0]), self.two(ids[:, 1]), self.sum(ids, None, weights)]
        parts += [self.mean(flat, offsets), self.max(ids)]
        return self.head(torch.tanh(torch.cat(parts, 1))).squeeze(1)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.sort(torch.randint(0, 20, (5,), generator=generator)).values
    return (
        torch.randint(0, ROWS, (6, 3), generator=generator),
        torch.randint(0, ROWS, (20,), generator=generator),
        torch.cat([torch.zeros(1, dtype=torch.int64), cuts]),
    )


def test_an_empty_batch_reaches_the_tables() -> None:
    with sr.InProcessCluster(shards=2).connect("empty") as session:
        model = model_of(session)
        lookups = [model.one, model.two]
        ids = [torch.empty(0, dtype=torch.int64)] * 2
        options = [number for layer in lookups for number in layer.lookup_options()]
        tables = "\n".join(layer.binding for layer in lookups)
        rows = ops.gather_all(ids, ids, ids, model.one.anchor, tables, options, True)
        assert [each.shape for each in rows] == [(0, DIM), (0, 3)]
        sum(each.sum() for each in rows).backward()
        session.step()  # it refuses a step in which no backward reached a table


def test_lists_of_what_no_lookup_has_may_be_empty() -> None:
    with sr.InProcessCluster(shards=2).connect("lists") as session:
        model = model_of(session)
        lookups, ids = [model.one, model.two], [torch.tensor([1, 3, 1]), torch.tensor([2])]
        options = [number for layer in lookups for number in layer.lookup_options()]
        tables = "\n".join(layer.binding for layer in lookups)
        rows = ops.gather_all(ids, (), (), model.one.anchor, tables, options, True)
        filled = ops.gather_all(ids, ids, ids, model.one.anchor, tables, options, True)
        assert all(torch.equal(one, other) for one, other in zip(rows, filled, strict=True))
        assert torch.equal(rows[0], model.one(ids[0]))
        before = model.one(ids[0]).detach()
        sum(each.sum() for each in rows).backward()
        session.step()
        assert (model.one(ids[0]) != before).any()


def model_of(session: sr.Session) -> Net:
    torch.manual_seed(0)
    return session.distribute(Net(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)


def train(session: sr.Session, model: nn.Module, steps: int = 6) -> list[float]:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(steps):
        loss = model(*batch(seed)).square().mean()
        loss.backward()
        session.step(dense)
        losses.append(float(loss))
    return losses


def test_a_compiled_model_pulls_once_a_forward_and_trains_as_the_model() -> None:
    cluster = sr.InProcessCluster(shards=2)
    with cluster.connect("plain") as session:
        expected = train(session, model_of(session))
    with cluster.connect("compiled") as session:
        model = sr.compile_model(model_of(session), backend="aot_eager", fullgraph=True)
        assert train(session, model) == expected
        stats = session.stats()
    assert (stats.pulls_merged, stats.lookups_missed) == (6, 0)
    assert stats.pulls == 6


def test_inductor_compiles_it_too() -> None:
    cluster = sr.InProcessCluster(shards=1)
    with cluster.connect("plain") as session:
        expected = train(session, model_of(session), 3)
    with cluster.connect("inductor") as session:
        assert train(session, sr.compile_model(model_of(session)), 3) == pytest.approx(expected, rel=1e-6)


def arguments(session: sr.Session) -> tuple[object, ...]:
    model_of(session)
    ids, flat, offsets = batch(1)
    weights = torch.rand(6, 3, requires_grad=True)
    lookups = [
        ("one", ids[:, 0], None, None, [DIM, -1, 3, 0, 0, 0]),
        ("sum", ids, None, weights, [DIM, 0, -1, 0, 0, 1]),
        ("mean", flat, offsets, None, [DIM, 1, 3, 0, 1, 0]),
        ("max", ids, None, None, [DIM, 2, -1, 0, 0, 0]),
    ]
    return (
        [ids for _, ids, *_ in lookups],
        [ids if offsets is None else offsets for _, ids, offsets, *_ in lookups],
        [ids if weights is None else weights for _, ids, _, weights, _ in lookups],
        torch.zeros(1, requires_grad=True),
        "\n".join(f"{session.namespace}/{name}" for name, *_ in lookups),
        [number for *_, options in lookups for number in options],
        True,
    )


def test_it_is_an_operator_as_torch_wants_it() -> None:
    with sr.InProcessCluster(shards=1).connect("checked") as session:
        opcheck(ops.gather_all, arguments(session), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("where", ["cuda", "meta"])
def test_compilers_see_rows_on_the_device_of_the_anchor_and_ids_on_the_host(where: str) -> None:
    options = [DIM, -1, -1, 0, 0, 0, DIM, 2, -1, 1, 1, 0]
    with FakeTensorMode():
        ids, anchor = torch.empty(7, 3, dtype=torch.int64), torch.empty(1, device=where)
        flat, offsets = torch.empty(9, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
        given = ([ids, flat], [ids, offsets], [])
        rows, bags, places = ops.gather_all(*given, anchor, "one\nmax", options, True)
        assert [tuple(each.shape) for each in (rows, bags, places)] == [(7, 3, DIM), (4, DIM), (4, DIM)]
        assert [each.dtype for each in (rows, bags, places)] == [torch.float32, torch.float32, torch.int64]
        back = ops.stage_all([rows, bags], *given, [places], "one\nmax", options, [0, 0])
        assert [tuple(each.shape) for each in back] == [(1,)]
        assert {each.device.type for each in (rows, bags, places, *back)} == {where}
        there = ops.gather_merged([torch.empty_like(ids, device=where), flat], [ids, offsets], [], "one\nmax", options)
        assert {each.device.type for each in there} == {where}


def test_weights_have_their_gradient_and_unused_outputs_stage_nothing() -> None:
    with sr.InProcessCluster(shards=1).connect("weights") as session:
        given = arguments(session)
        out = ops.gather_all(*given)
        assert len(out) == 5  # four lookups, and the places of max
        assert out[4].dtype == torch.int64
        out[1].sum().backward()
        weights = given[2][1]
        table = session.table("sum")
        rows = torch.from_numpy(table.pull(given[0][1].reshape(-1).numpy().astype("uint64"))).view(6, 3, DIM)
        assert torch.allclose(weights.grad, rows.sum(2))
        before = {name: session.table(name).pull(given[0][0].numpy().astype("uint64")) for name in ("one", "max")}
        session.step()
        for name, rows_before in before.items():
            assert (session.table(name).pull(given[0][0].numpy().astype("uint64")) == rows_before).all()
        assert session.stats().rows_pushed == len(set(given[0][1].reshape(-1).tolist()))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda given: (given[0][:2], *given[1:]), "2 ids, 4 tables"),
        (lambda given: (*given[:5], given[5][:-1], True), "23 options"),
        (lambda given: (given[0], (), *given[2:]), "lookup 2 has offsets or weights"),
        (lambda given: (*given[:2], (), *given[3:]), "lookup 1 has offsets or weights"),
        (
            lambda given: ([given[0][0] + ROWS, *given[0][1:]], *given[1:]),
            r"id of table 'refused/one': .* is not allowed",
        ),
    ],
    ids=["lists", "options", "offsets", "weights", "ids"],
)
def test_arguments_that_do_not_fit_are_named(change: object, text: str) -> None:
    with sr.InProcessCluster(shards=1).connect("refused") as session, pytest.raises(ValueError, match=text):
        ops.gather_all(*change(arguments(session)))


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=r"compile_model\.model: 'Linear' is not allowed"):
        sr.compile_model(nn.Linear(2, 1))
