"""A distributed model, exported and compiled by AOTInductor, runs in a C++ program that holds no Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from torch_program import build_torch_program

SUPPORT = Path(__file__).resolve().parents[1] / "support"


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(10, 4)
        self.bag = nn.EmbeddingBag(10, 4, mode="mean")

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.one(ids) * 2 + self.bag(bags)


@pytest.mark.full
def test_compiled_package_runs_without_python(tmp_path: Path) -> None:
    with sr.InProcessCluster().connect("aoti") as session:
        model = session.distribute(Scorer(), optimizer=sr.optim.SGD(), min_rows=1).eval()
        ids, bags = torch.tensor([1, 5, 9]), torch.tensor([[1, 2], [3, 4], [5, 5]])
        size = torch.export.Dim("size", min=2, max=1024)
        program = torch.export.export(model, (ids, bags), dynamic_shapes=({0: size}, {0: size}))
        with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):  # less to compile
            package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    command = [
        str(build_torch_program(SUPPORT / "aoti_main.cc", tmp_path / "aoti_main")),
        str(package),
        "aoti/one",
        "aoti/bag",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    *values, python = done.stdout.split("\n")[:-1]
    columns = np.arange(4) * 0.25
    expected = np.stack([(np.array(i) + columns) * 2 + m + columns for i, m in ((1, 1.5), (5, 3.5), (9, 5.0))])
    np.testing.assert_allclose([float(value) for value in values], expected.ravel(), rtol=1e-6)
    assert python == "no python"
    unbound = subprocess.run(command[:3], capture_output=True, text=True, timeout=600, check=False)
    assert unbound.returncode == 1
    assert "'aoti/bag' is not bound" in unbound.stderr
