"""A model with keyword arguments as a module with positional ones, as it is exported."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sparserow.worker.publish.by_position import by_position
from sparserow.worker.publish.program_export import ProgramSource, export_program


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        return {"sum": self.scale * (tensors["a"] - tensors["b"])}


def test_it_calls_the_model_by_the_names_of_the_positions() -> None:
    module = by_position(ByName(), ("b", "a"))
    assert float(module(torch.tensor(1.0), torch.tensor(4.0))["sum"]) == 6.0


def test_a_copy_has_weights_of_its_own() -> None:
    module = by_position(ByName(), ("a", "b"))
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.get_parameter("model.scale").fill_(0.0)
    assert float(other(torch.tensor(4.0), torch.tensor(1.0))["sum"]) == 6.0


def test_it_is_exported_with_an_argument_for_each_name() -> None:
    source = ProgramSource(by_position(ByName(), ("a", "b")), (torch.ones(3), torch.zeros(3)))
    assert len(export_program(source, is_signed=False).archive) > 0
