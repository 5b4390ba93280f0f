"""An exported program holds what is the model's, and no data that its tensors or its example are views of."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.worker.publish.program_export import ProgramSource, export_program

ROWS = 1_000_000
KIB = 1 << 10


class Model(nn.Module):
    """A linear layer over normalised columns, whose tensors may be views of larger ones."""

    def __init__(self, mean: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.scale = scale  # becomes a constant of the program
        self.weight = nn.Parameter(weight)

    def forward(self, columns: list[torch.Tensor]) -> torch.Tensor:
        return (torch.stack(columns, 1) - self.mean) * self.scale @ self.weight


@pytest.fixture(scope="module")
def column() -> torch.Tensor:
    return torch.arange(ROWS, dtype=torch.float32)


def source(model: nn.Module, column: torch.Tensor) -> ProgramSource:
    batch = torch.export.Dim("batch", min=1)
    return ProgramSource(model, ([column[:4], column[4:8]],), (([{0: batch}, {0: batch}]),))


def test_views_of_data_are_published_alone(column: torch.Tensor) -> None:
    large = torch.randn(ROWS)
    model = Model(large[:2], large[10:14:2], large[100:102])
    program = export_program(source(model, column), is_signed=False)
    assert len(program.archive) < 64 * KIB, "4 MB are behind each of the model's tensors and of the example"
    assert {tensor.name: tensor.bytes for tensor in program.largest} == {"mean": 8, "scale": 8, "weight": 8}
    loaded = torch.export.load(io.BytesIO(program.archive)).module()
    given = [column[20:27], column[30:37]]
    torch.testing.assert_close(loaded(given), model(given))
    assert large.untyped_storage().nbytes() == ROWS * 4, "the model itself is as it was"
    assert model.mean.data_ptr() == large.data_ptr()


def compiled_part(model: nn.Module) -> nn.Module:
    return nn.Sequential(torch.compile(model, backend="eager"))


@pytest.mark.parametrize("compiled", [lambda model: torch.compile(model, backend="eager"), compiled_part])
def test_the_module_inside_a_compiled_one_is_exported(column: torch.Tensor, compiled: Any) -> None:
    model = Model(torch.ones(2), torch.ones(2), torch.randn(2))
    program = export_program(source(compiled(model), column), is_signed=False)
    loaded = torch.export.load(io.BytesIO(program.archive)).module()
    given = [column[20:27], column[30:37]]
    torch.testing.assert_close(loaded(given), model(given))
    assert not any("_orig_mod" in tensor.name for tensor in program.largest)


@pytest.mark.parametrize("name", ["mean", "scale", "weight"])
def test_a_model_that_holds_data_is_not_published(column: torch.Tensor, name: str) -> None:
    parts = {part: torch.ones(2) for part in ("mean", "scale", "weight")}
    model = Model(**{**parts, name: column[:2]})
    words = rf"publish: '{name}' of the model, \(2,\), lies in the memory of an argument in `example` \(3\.8 MiB\)"
    with pytest.raises(sr.errors.InvalidArgument, match=words):
        export_program(source(model, column), is_signed=False)


class Warns(nn.Module):
    """Warns in its forward."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        warnings.warn("this model is old", UserWarning, stacklevel=1)
        return value + 1


def test_the_models_own_warnings_are_shown_and_those_of_torch_are_not(column: torch.Tensor) -> None:
    class WithAnchor(Warns):
        """Has a tensor like that of a distributed layer, of which torch warns."""

        def __init__(self) -> None:
            super().__init__()
            self.anchor = torch.zeros(1, requires_grad=True)

        def forward(self, value: torch.Tensor) -> Any:
            return super().forward(value) + self.anchor

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        export_program(ProgramSource(WithAnchor(), (column[:4],)), is_signed=False)
    assert {str(warning.message) for warning in seen} == {"this model is old"}


class Ranked(nn.Module):
    """A table and a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)
        self.tower = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.table(ids))


def test_a_tower_on_the_servers_is_in_the_program_once() -> None:
    with sr.InProcessCluster(shards=1).connect("tower") as session:
        model = session.distribute(Ranked(), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.5))
        ids = torch.arange(3)
        program = export_program(ProgramSource(model, (ids,)), is_signed=False)
        exported = torch.export.load(io.BytesIO(program.archive))
        assert set(exported.state_dict) == {f"tower.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
        assert set(exported.constants) == {"table.anchor"}, "the hook that pulls the tower is no part of the program"
        lookups = [str(node.args) for node in exported.graph.nodes if "sparserow" in str(node.target)]
        assert len(lookups) == 1, lookups
        assert "tower/table" in lookups[0]
        with torch.no_grad():
            torch.testing.assert_close(exported.module()(ids), model.eval()(ids))


def test_bags_of_two_dimensions_are_no_code() -> None:
    """Their offsets end at rows times length, a product of sizes that torch writes as an expression."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(10, 4, mode="mean")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    model, ids = Bags(), torch.arange(6).reshape(2, 3)
    program = export_program(ProgramSource(model, (ids,)), is_signed=False)
    loaded = torch.export.load(io.BytesIO(program.archive)).module()
    torch.testing.assert_close(loaded(ids), model(ids))
