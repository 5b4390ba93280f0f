"""Ids that a model cuts out of a batch and casts are pulled ahead like the batch's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import sparserow as sr

ROWS, DIM, COLUMNS, BAG, STEPS = 80, 3, 4, 5, 8
WIDTH = COLUMNS + BAG + 2
TABLES = 2 * COLUMNS + 1


class FloatMatrix(nn.Module):
    """As DeepCTR's models: X holds ids, ids of a bag and dense values, all as floats."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.deep = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(COLUMNS))
        self.linear = nn.ModuleList(nn.Embedding(ROWS, 1) for _ in range(COLUMNS))
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        deep = [table(x[:, i : i + 1].long()).sum(-1) for i, table in enumerate(self.deep)]
        linear = [table(x[:, i : i + 1].long()).sum(-1) for i, table in enumerate(self.linear)]
        bag = self.bag(x[:, COLUMNS : COLUMNS + BAG].long()).sum(-1, keepdim=True)
        return torch.cat([*deep, *linear, bag, x[:, -2:]], dim=1).sum(1)


class Cut(nn.Module):
    """``cut`` makes the ids of each table of a batch."""

    def __init__(self, cut: Callable[[Any], list[Tensor]], tables: int = COLUMNS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(tables))
        self.cut = cut

    def forward(self, x: Any) -> Tensor:
        return torch.stack([table(ids).sum() for table, ids in zip(self.tables, self.cut(x), strict=True)]).sum()


@dataclass(frozen=True)
class Jagged:
    """One key of a keyed jagged tensor."""

    part: Tensor

    def values(self) -> Tensor:
        return self.part


class KeyedJagged:
    """The part of torchrec's interface that models use."""

    def __init__(self, keys: list[str], values: Tensor, lengths: list[int]) -> None:
        self._keys, self._values, self._lengths = keys, values, lengths

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offset_per_key(self) -> list[int]:
        return [0, *np.cumsum(self._lengths).tolist()]

    def __getitem__(self, key: str) -> Jagged:
        index, offsets = self._keys.index(key), self.offset_per_key()
        return Jagged(self._values[offsets[index] : offsets[index + 1]])


class DictOfJagged:
    """One without offsets."""

    def __init__(self, whole: KeyedJagged) -> None:
        self._whole = whole

    def keys(self) -> list[str]:
        return self._whole.keys()

    def values(self) -> Tensor:
        return self._whole.values()

    def to_dict(self) -> dict[str, Jagged]:
        return {key: self._whole[key] for key in self.keys()}

    def __getitem__(self, key: str) -> Jagged:
        return self._whole[key]


def matrix(seed: int, rows: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (rows, WIDTH - 2), generator=generator)
    return torch.cat([ids.float(), torch.rand(rows, 2, generator=generator)], dim=1)


def jagged(seed: int) -> KeyedJagged:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (COLUMNS,), generator=generator).tolist()
    return KeyedJagged(list("abcd"), torch.randint(0, ROWS, (sum(lengths),), generator=generator), lengths)


def of_keys(x: Any) -> list[Tensor]:
    return [x[key].values() for key in "abcd"]


def connect(namespace: str = "cut") -> sr.Session:
    return sr.InProcessCluster(shards=2).connect(namespace)


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with connect() as session:
        yield session
    assert _get_current_dispatch_mode() is None


def distributed(model: nn.Module, session: sr.Session) -> nn.Module:
    return session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.3), min_rows=1)


def without_hooks(model: nn.Module) -> nn.Module:
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()
    return model


def train(model: nn.Module, session: sr.Session, batches: Any) -> list[int]:
    """Returns the pulls of each forward."""
    pulls = []
    for batch in batches:
        before = session.stats().pulls
        loss = (model(batch) ** 2).sum()
        pulls.append(session.stats().pulls - before)
        loss.backward()
        session.step()
    return pulls


def all_rows(session: sr.Session) -> dict[str, np.ndarray[Any, Any]]:
    return {name: session.table(name).pull(np.arange(ROWS)) for name in sorted(session.core.bound_tables())}


def assert_equal_rows(session: sr.Session, make: Callable[[], nn.Module], batches: list[Any]) -> None:
    """Those of a loop without hooks, in a session of the same name; this one is closed for it."""
    found = all_rows(session)
    session.close()
    with connect() as plain:
        train(without_hooks(distributed(make(), plain)), plain, batches)
        expected = all_rows(plain)
    assert found.keys() == expected.keys()
    for name, rows in found.items():
        np.testing.assert_array_equal(rows, expected[name], err_msg=name)


WAYS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "cast then cut": lambda x: list(x.long()[:, :COLUMNS].unbind(1)),
    "split": lambda x: [part.int() for part in x.split([1] * COLUMNS + [WIDTH - COLUMNS], dim=1)[:COLUMNS]],
    "chunk": lambda x: [part.squeeze(-1).long() for part in x[:, :COLUMNS].chunk(COLUMNS, dim=1)],
    "transposed": lambda x: [x.t()[i].contiguous().to(torch.int64) for i in range(COLUMNS)],
    "reshaped": lambda x: [x[:, i : i + 1].reshape(-1).long() for i in range(COLUMNS)],
    "viewed": lambda x: [x[:, : 2 * COLUMNS].reshape(x.shape[0], COLUMNS, 2)[:, i].long() for i in range(COLUMNS)],
    "cloned": lambda x: [x.clone()[:, i].detach().long().unsqueeze(1).expand(-1, 2) for i in range(COLUMNS)],
    "from the end": lambda x: [x[: len(x), -3 - i :][:, 0].long() for i in range(COLUMNS)],
}


def test_a_float_matrix_is_one_pull_a_forward(session: sr.Session) -> None:
    model = distributed(FloatMatrix(), session)
    batches = [matrix(seed, rows=7 if seed < STEPS - 1 else 4) for seed in range(STEPS)]
    assert train(model, session, batches) == [TABLES] + [1] * (STEPS - 1)
    assert session.stats().lookups_missed == 0
    model.eval()
    before = session.stats().pulls
    with torch.inference_mode():
        model(matrix(99))
    assert session.stats().pulls - before == 1
    assert_equal_rows(session, FloatMatrix, batches)


def test_a_first_forward_without_autograd_shows_as_much(session: sr.Session) -> None:
    model = distributed(FloatMatrix(), session).eval()
    with torch.inference_mode():
        model(matrix(99))
    model.train()
    assert train(model, session, [matrix(seed) for seed in range(3)]) == [1, 1, 1]
    assert session.stats().lookups_missed == 0


@pytest.mark.parametrize("way", WAYS)
def test_views_and_casts_are_followed(way: str, session: sr.Session) -> None:
    model = distributed(Cut(WAYS[way]), session)
    batches = [matrix(seed, rows) for seed, rows in enumerate((7, 7, 5, 9))]
    assert train(model, session, batches) == [COLUMNS, 1, 1, 1]
    assert session.stats().lookups_missed == 0
    assert_equal_rows(session, lambda: Cut(WAYS[way]), batches)


def test_a_batch_changed_before_the_forward_is_followed_and_one_changed_within_is_not(session: sr.Session) -> None:
    model = distributed(Cut(lambda x: [x[:, i].long() for i in range(COLUMNS)]), session)
    batch = matrix(0)
    assert train(model, session, (batch.copy_(matrix(seed)) for seed in range(3))) == [COLUMNS, 1, 1]

    def shifted(x: Tensor) -> list[Tensor]:
        ids = x.long()
        ids[:, :COLUMNS].add_(1).remainder_(ROWS)
        return [ids[:, i] for i in range(COLUMNS)]

    with connect("other") as other:
        changes = distributed(Cut(shifted), other)
        assert train(changes, other, [matrix(seed) for seed in range(3)]) == [COLUMNS] * 3
        assert other.stats().lookups_missed == 0  # no guess was made


@pytest.mark.parametrize("make", [jagged, lambda seed: DictOfJagged(jagged(seed))], ids=["offsets", "dict"])
def test_a_keyed_jagged_tensor_is_one_pull_a_forward(make: Callable[[int], Any], session: sr.Session) -> None:
    model = distributed(Cut(of_keys), session)
    batches = [make(seed) for seed in range(STEPS)]
    assert train(model, session, batches) == [COLUMNS] + [1] * (STEPS - 1)
    assert session.stats().lookups_missed == 0
    assert_equal_rows(session, lambda: Cut(of_keys), batches)


@pytest.mark.parametrize(
    ("make", "model", "in_loop"),
    [
        (matrix, FloatMatrix, lambda x: x),
        (lambda seed: {"x": matrix(seed).double(), "y": torch.rand(3)}, FloatMatrix, lambda batch: batch["x"].float()),
        (lambda seed: matrix(seed).numpy(), FloatMatrix, torch.from_numpy),
        (jagged, lambda: Cut(of_keys), lambda x: x),
    ],
    ids=["matrix", "cast in the loop", "numpy", "jagged"],
)
def test_a_prefetch_learns_them_from_the_forward(
    make: Callable[[int], Any],
    model: Callable[[], nn.Module],
    in_loop: Callable[[Any], Any],
    session: sr.Session,
    caplog: pytest.LogCaptureFixture,
) -> None:
    distributed_model = distributed(model(), session)
    batches = [make(seed) for seed in range(STEPS)]
    inputs = (in_loop(batch) for batch in session.prefetch(batches, depth=2))
    train(distributed_model, session, inputs)
    stats = session.stats()
    if isinstance(batches[0], np.ndarray):  # no tensor of the batch
        assert stats.rows_prefetched == 0
    else:
        assert stats.rows_prefetched > 0
        assert stats.pulls_merged == 0  # nothing was left to the forwards
        assert "prefetch" not in caplog.text
    assert stats.lookups_missed == 0
    assert_equal_rows(session, model, [in_loop(batch) for batch in batches])


def test_a_cut_that_depends_on_the_batch_stays_right(session: sr.Session) -> None:
    def cut(x: Tensor) -> list[Tensor]:
        first = int(x[0, 0]) % 3
        return [x[:, first + i].long() for i in range(COLUMNS)]

    model = distributed(Cut(cut), session)
    batches = [matrix(seed) for seed in range(40)]
    pulls = train(model, session, batches)
    assert session.stats().lookups_missed > 0
    assert pulls[-10:] == [COLUMNS] * 10  # after so many wrong guesses there are none
    assert_equal_rows(session, lambda: Cut(cut), batches)


def test_a_batch_that_an_expression_does_not_fit_is_no_error(session: sr.Session) -> None:
    model = distributed(Cut(lambda x: [x[:, i % x.shape[1]].long() for i in range(COLUMNS)]), session)
    batches = [matrix(0), matrix(1), matrix(2)[:, :2], matrix(3)[:0], matrix(4).long(), matrix(5)]
    train(model, session, batches)
    assert_equal_rows(session, lambda: Cut(lambda x: [x[:, i % x.shape[1]].long() for i in range(COLUMNS)]), batches)


def test_a_forward_that_raises_leaves_no_trace_behind(session: sr.Session) -> None:
    model = distributed(FloatMatrix(), session)
    with pytest.raises(IndexError):
        model(matrix(0)[0])
    assert _get_current_dispatch_mode() is None
    assert train(model, session, [matrix(0)]) == [TABLES]  # the trace was of no use
    assert session.stats().lookups_missed == 0


def test_an_interrupted_forward_is_forgotten_by_the_next(session: sr.Session) -> None:
    model = distributed(FloatMatrix(), session)
    hook = model.bag.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(matrix(0))
    hook.remove()
    session.discard()
    assert train(model, session, [matrix(0), matrix(1)])[1] == 1
    assert session.stats().lookups_missed == 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_compiled_part_is_compiled_while_the_forward_is_traced(session: sr.Session) -> None:
    class Partly(FloatMatrix):
        def __init__(self) -> None:
            super().__init__()
            self.compiled = 0
            self.tower = torch.compile(nn.Linear(1, 1), backend=self._backend)

        def _backend(self, graph: torch.fx.GraphModule, _: Any) -> Any:
            self.compiled += 1
            return graph.forward

        def forward(self, x: Tensor) -> Tensor:
            return self.tower(super().forward(x).unsqueeze(1))

    model = distributed(Partly(), session)
    assert train(model, session, [matrix(seed) for seed in range(3)]) == [TABLES, 1, 1]
    assert model.compiled == 1


def test_a_compiled_model_makes_one_pull_as_well(session: sr.Session) -> None:
    model = distributed(FloatMatrix(), session)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert train(compiled, session, [matrix(seed) for seed in range(3)]) == [1] * 3
    assert session.stats().pulls_merged == 3
