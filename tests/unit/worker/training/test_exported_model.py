"""What a job publishes of a model: the model itself, or what its method ``for_serving`` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.worker.data import NamedBatch, NamedPart
from sparserow.worker.training.exported_model import exported


class Tower(nn.Module):
    """The part of a model that is served."""

    def __init__(self, scale: nn.Linear) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"score": self.scale(x[:, None]).squeeze(1)}


class Model(nn.Module):
    """Scores each sample with each other one, which nobody asks a server for."""

    def __init__(self, served: Any = None) -> None:
        super().__init__()
        self.scale, self.served = nn.Linear(1, 1), served

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x[:, None]) @ x[None]

    def for_serving(self) -> Any:
        return Tower(self.scale) if self.served is None else self.served


def batches() -> list[NamedBatch]:
    return [NamedBatch((NamedPart({"x": torch.arange(3.0)}, torch.zeros(3)),))]


def test_what_for_serving_returns_is_exported() -> None:
    model = Model()
    source = exported(model, batches())
    program = torch.export.export(source.model.eval(), source.example, dynamic_shapes=source.dynamic_shapes).module()
    x = torch.randn(5)
    torch.testing.assert_close(program(x)["score"], model.scale(x[:, None]).squeeze(1))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"what for_serving returns: 'int' is not allowed; allowed: an nn\.Module"
    ):
        exported(Model(served=3), batches())
