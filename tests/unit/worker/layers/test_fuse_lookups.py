"""``merge_lookups``: independent lookups of a graph are one round trip, and results stay what they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import sparserow as sr
from sparserow.worker.layers.fuse_lookups import count_merged

ROWS, DIM = 300, 4


class Ranker(nn.Module):
    """Rows, bags of every kind, two tables of one width, and a table of another."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM)
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.tags = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=1)
        self.words = nn.EmbeddingBag(ROWS, 2 * DIM, mode="sum", include_last_offset=True)
        self.top = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.head = nn.Linear(7 * DIM, 1)

    def forward(self, ids: Tensor, bags: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        parts = [self.user(ids), self.item(ids * 3 % ROWS), self.tags(bags)]
        parts.append(self.words(bags.flatten(), offsets, per_sample_weights=weights.flatten()))
        parts += [self.top(bags), self.user((ids + 5) % ROWS)]
        return self.head(torch.cat(parts, dim=1)).squeeze(1)


class Chained(nn.Module):
    """The second lookup's ids come from the first one's rows, the third one's from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Embedding(ROWS, DIM) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        found = self.first(ids)
        next_ids = (found.sum(1).abs() * 1000).long() % ROWS
        return self.second(next_ids) + self.third(ids) + self.third(next_ids)


def batch(seed: int, size: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, ROWS, (size,), generator=made),
        torch.randint(0, ROWS, (size, 3), generator=made),
        torch.arange(size + 1) * 3,
        torch.rand(size, 3, generator=made),
    )


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("merge") as session:
        yield session


def distributed(net: nn.Module, session: sr.Session) -> nn.Module:
    return session.distribute(net, optimizer=sr.optim.SGD(lr=0.1), min_rows=1).eval()


def exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    size = torch.export.Dim("size", min=2, max=64)
    shapes: tuple[Any, ...] = ({0: size}, {0: size}, {0: size + 1}, {0: size})[: len(inputs)]
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return type(module).__name__.startswith("Distributed") or super().is_leaf_module(module, name)


def traced(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    del inputs
    return fx.GraphModule(model, _Tracer().trace(model)).eval()


CAPTURES: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Any]] = {
    "exported": exported,
    "unlifted": lambda model, inputs: exported(model, inputs).module(),
    "symbolic": traced,
}


def pulls_of(session: sr.Session, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    before = session.stats().pulls
    with torch.no_grad():
        out = module(*inputs)
    return out, session.stats().pulls - before


@pytest.mark.parametrize("capture", CAPTURES)
def test_all_tables_are_one_round_trip(session: sr.Session, capture: str) -> None:
    model = distributed(Ranker(), session)
    program = CAPTURES[capture](model, batch(0))
    merged = sr.merge_lookups(program, check=batch(1))
    assert count_merged(merged) == 6
    original = program.module() if isinstance(program, torch.export.ExportedProgram) else program
    for seed in range(2, 6):
        want, many = pulls_of(session, original, batch(seed, seed))
        have, one = pulls_of(session, merged, batch(seed, seed))
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
        assert (many, one) == (6, 1)


def test_a_merged_program_is_exported_again_and_saved(session: sr.Session, tmp_path: Any) -> None:
    model = distributed(Ranker(), session)
    merged = sr.merge_lookups(exported(model, batch(0)))
    again = exported(merged, batch(0))
    torch.export.save(again, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert "sparserow.gather_merged.default" in {str(node.target) for node in loaded.graph.nodes}
    have, one = pulls_of(session, loaded.module(), batch(7, 9))
    assert one == 1
    with torch.no_grad():
        torch.testing.assert_close(have, model(*batch(7, 9)), rtol=1e-6, atol=1e-6)


def test_a_merged_program_has_the_weights_of_the_dense_part_alone(session: sr.Session) -> None:
    merged = sr.merge_lookups(exported(distributed(Ranker(), session), batch(0)))
    again = exported(merged, batch(0))
    assert sorted(again.state_dict) == ["head.bias", "head.weight"]
    assert not again.constants


@pytest.mark.parametrize("capture", CAPTURES)
def test_what_waits_for_a_lookup_is_a_round_of_its_own(session: sr.Session, capture: str) -> None:
    model = distributed(Chained(), session)
    ids = (batch(0)[0],)
    merged = sr.merge_lookups(CAPTURES[capture](model, ids), check=ids)
    have, rounds = pulls_of(session, merged, (batch(3)[0],))
    assert rounds == 2
    with torch.no_grad():
        torch.testing.assert_close(have, model(batch(3)[0]), rtol=1e-6, atol=1e-6)


def test_what_is_written_to_between_two_lookups_is_not_moved(session: sr.Session) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

        def forward(self, ids: Tensor) -> Tensor:
            found = self.first(ids)
            ids.add_(1)
            return found + self.second(ids)

    model = distributed(Writes(), session)
    merged = sr.merge_lookups(traced(model, ()))
    assert count_merged(merged) == 0
    with torch.no_grad():
        torch.testing.assert_close(merged(torch.tensor([3, 4])), model(torch.tensor([3, 4])))


def test_output_of_another_dtype_and_one_lookup_alone(session: sr.Session) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(ids), self.second(ids)

    model = distributed(Two(), session).to(torch.bfloat16)
    ids = torch.tensor([5, 6])
    merged = sr.merge_lookups(traced(model, ()), check=(ids,))
    assert count_merged(merged) == 2
    assert [part.dtype for part in merged(ids)] == [torch.bfloat16] * 2
    with pytest.raises(
        sr.errors.InvalidArgument, match="program: type: 'Two' is not allowed; allowed: ExportedProgram"
    ):
        sr.merge_lookups(model)
    with pytest.raises(ValueError, match="id of table 'merge/first': 300 is not allowed"):
        merged(torch.tensor([0, 300]))


def test_training_lookups_are_left_alone(session: sr.Session) -> None:
    model = distributed(Ranker(), session).train()
    assert count_merged(sr.merge_lookups(traced(model, ()).train())) == 0


def test_an_op_with_options_of_another_number_is_refused() -> None:
    ids = torch.tensor([1])
    with pytest.raises(ValueError, match="1 ids, 1 tables, 2 options; allowed: as many of each"):
        torch.ops.sparserow.gather_merged([ids], [ids], [ids], "n/t", [1, 2])
