"""Lines of ``sparserow predict``: a row of values, or of a model with several tasks an object."""

from __future__ import annotations

import json

import torch
from sparserow.serving.inference.prediction import format_output


def test_a_tensor_gives_its_values_and_several_are_side_by_side() -> None:
    assert list(format_output(torch.tensor([0.25, -3.0]))) == ["0.25", "-3"]
    assert list(format_output((torch.tensor([1, 2]), torch.tensor([[0.5, 7], [8, 9]])))) == ["1,0.5,7", "2,8,9"]


def test_an_output_by_name_gives_an_object_a_row() -> None:
    output = {"click": torch.tensor([1 / 3, 2.0]), "scores": torch.tensor([[1.0, 2.5], [3.0, float("nan")]])}
    lines = [json.loads(line) for line in format_output(output)]
    assert lines == [{"click": 0.3333333, "scores": [1, 2.5]}, {"click": 2, "scores": [3, None]}]
    assert list(format_output({"click": torch.empty(0)})) == []
