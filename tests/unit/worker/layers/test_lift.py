"""``lift_embeddings``: graphs of ordinary models, captured in every way, give and learn the same on servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import sparserow as sr

ROWS, DIM, BATCH, LENGTH = 40, 4, 6, 3


class Ranker(nn.Module):
    """Layers, a bare parameter read twice, pooled bags of every kind, and a table that is too small to move."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM, padding_idx=3)
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.words = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True)
        self.top = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.items = nn.Parameter(torch.randn(ROWS, DIM))
        self.day = nn.Embedding(7, DIM)
        self.head = nn.Linear(7 * DIM, 1)

    def forward(self, ids: Tensor, bags: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        words = self.words(bags.flatten(), offsets, per_sample_weights=weights.flatten())
        parts = [
            self.user(ids),
            self.tags(bags),
            words,
            self.top(bags),
            functional.embedding(ids, self.items),
            functional.embedding((ids * 7 + 1) % ROWS, self.items),
            self.day(ids % 7),
        ]
        return self.head(torch.cat(parts, dim=1)).squeeze(1)


LIFTED = ["items", "tags", "top", "user", "words"]


def batch(seed: int, size: int = BATCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, ROWS, (size,), generator=generator),
        torch.randint(0, ROWS, (size, LENGTH), generator=generator),
        torch.arange(size + 1) * LENGTH,
        torch.rand(size, LENGTH, generator=generator),
    )


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    size = torch.export.Dim("size", min=2, max=64)
    shapes = ({0: size}, {0: size}, {0: size + 1}, {0: size})
    return torch.export.export(model, batch(0), dynamic_shapes=shapes)


CAPTURES: dict[str, Callable[[nn.Module], Any]] = {
    "exported": exported,
    "decomposed": lambda model: exported(model).run_decompositions(),
    "unlifted": lambda model: exported(model).module(),
    "symbolic": fx.symbolic_trace,
}


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("lift") as session:
        yield session


def model() -> Ranker:
    torch.manual_seed(4)
    return Ranker()


def lift(program: Any, session: sr.Session, **options: Any) -> fx.GraphModule:
    return session.lift_embeddings(program, **{"optimizer": sr.optim.SGD(lr=0.05), "min_rows": 20, **options})


@pytest.mark.parametrize("capture", CAPTURES)
def test_results_and_training_equal_the_local_model(session: sr.Session, capture: str) -> None:
    local = model()
    program = CAPTURES[capture](model())
    lifted = lift(program, session, check=batch(0))
    assert sorted(session.core.bound_tables()) == LIFTED
    names = [name for name in sorted(lifted.state_dict()) if not name.endswith("._extra_state")]
    assert names == ["day.weight", "head.bias", "head.weight"]
    lifted.train()
    dense = torch.optim.SGD(lifted.parameters(), lr=0.05)
    reference = torch.optim.SGD(local.parameters(), lr=0.05)
    for step in range(12):
        inputs = batch(step, 2 + step)
        want, have = local(*inputs), lifted(*inputs)
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
        for loss, optimizer in ((want.square().mean(), reference), (have.square().mean(), dense)):
            optimizer.zero_grad()
            loss.backward()
            if optimizer is reference:
                optimizer.step()
        session.step(dense)
    kept = program.state_dict if isinstance(program, torch.export.ExportedProgram) else program.state_dict()
    assert {"items", "user.weight"} <= set(kept)  # the program itself is as it was
    for name in LIFTED:
        weight = getattr(local, name)
        rows = (weight if isinstance(weight, Tensor) else weight.weight).detach().numpy()
        np.testing.assert_allclose(session.table(name).pull(np.arange(ROWS)), rows, rtol=1e-5, atol=1e-6)


def test_lookups_of_inputs_are_one_pull(session: sr.Session) -> None:
    lifted = lift(exported(model()), session).train()
    for step in range(4):
        before = session.stats()
        lifted(*batch(step)).sum().backward()
        session.step()
        after = session.stats()
    # The bags' flattened ids and the computed ids of `items` are not tensors of the batch.
    assert after.pulls_merged - before.pulls_merged == 1
    assert after.pulls - before.pulls <= 3
    assert after.lookups_missed - before.lookups_missed <= 2


def test_a_lifted_program_can_be_exported_again(session: sr.Session) -> None:
    lifted = lift(exported(model()), session).eval()
    again = exported(lifted)
    targets = {str(node.target) for node in again.graph.nodes}
    assert {"sparserow.gather.default", "sparserow.gather_bag.default"} <= targets
    assert not targets & {"aten.embedding_bag.padding_idx"}
    assert not any(tensor.shape[0] == ROWS for tensor in again.state_dict.values())
    inputs = batch(9, 11)
    torch.testing.assert_close(again.module()(*inputs), model()(*inputs), rtol=1e-6, atol=1e-6)


def test_bags_keep_the_shape_that_the_model_gave_them(session: sr.Session) -> None:
    lifted = lift(exported(model()), session)
    calls = {str(node.target): node.args for node in lifted.graph.nodes if node.op == "call_module"}
    assert [arg if arg is None else arg.name for arg in calls["lookup_top_0"]] == ["bags", None, None]


def test_tables_options_and_existing_rows(session: sr.Session) -> None:
    tables = {"us*": sr.Table(optimizer=sr.optim.Adam(lr=0.1), init=sr.Constant(0.25))}
    lift(exported(model()), session, tables=tables)
    np.testing.assert_array_equal(session.table("user").pull([1]), np.full((1, DIM), 0.25, np.float32))
    assert isinstance(session.table("user").schema.optimizer, sr.optim.Adam)


def test_check_finds_a_table_with_rows_of_its_own(session: sr.Session) -> None:
    schema = sr.TableSchema("lift", "top", DIM, sr.optim.SGD(lr=0.05), init=sr.Normal(0.0, 1.0))
    session.core.catalog.create_table(schema)
    with pytest.raises(sr.errors.FailedPrecondition, match="output 0 differs from the program's by"):
        lift(exported(model()), session, check=batch(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(ROWS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.word(ids) @ self.word.weight.t()


class OneBag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


class Frozen(OneBag):
    def __init__(self) -> None:
        super().__init__()
        self.bag.weight.requires_grad_(False)


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "tied": (Tied(), "'word.weight' cannot be lifted: .* reads it otherwise than by ids"),
    "frozen": (Frozen(), "'bag.weight' cannot be lifted: it is frozen"),
    "by frequency": (OneBag(scale_grad_by_freq=True, mode="sum"), "'bag.weight' .* scale_grad_by_freq"),
    "float64": (OneBag(dtype=torch.float64), "'bag.weight' .* it is torch.float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(session: sr.Session, case: str) -> None:
    net, text = REFUSED[case]
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(sr.errors.FailedPrecondition, match=text):
        lift(torch.export.export(net, (ids,)), session)
    assert not session.core.catalog.list_tables("lift")


def test_layers_left_whole_are_refused_as_operators_are(session: sr.Session) -> None:
    with pytest.raises(sr.errors.FailedPrecondition, match="max_norm renormalises"):
        lift(fx.symbolic_trace(OneBag(max_norm=1.0)), session)


def test_arguments_are_checked(session: sr.Session) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match="no lookup reads a weight of min_rows=41 rows"):
        lift(exported(model()), session, min_rows=ROWS + 1)
    with pytest.raises(
        sr.errors.InvalidArgument, match="program: type: 'Ranker' is not allowed; allowed: ExportedProgram"
    ):
        lift(model(), session)
    with pytest.raises(sr.errors.InvalidArgument, match=r"tables\['x\*'\] matches no layer"):
        lift(exported(model()), session, tables={"x*": sr.Table()})
    assert not session.core.catalog.list_tables("lift")
