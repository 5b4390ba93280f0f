"""A published program, compiled by AOTInductor, runs in a C++ service that reads its rows from a serving process.

A minute of compilers: with SPARSEROW_TEST_FULL=1."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.serving.client.replica_map import fetch_view
from sparserow.serving.inference.load_program import load_program
from torch_program import build_torch_program

SOURCE = Path(sr.__file__).parent / "deploy" / "examples" / "online_inference.cc"


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tags = nn.EmbeddingBag(500, 4, mode="mean")
        self.first = nn.Embedding(500, 4)
        self.tower = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.tower(torch.cat([self.tags(ids), self.first(ids[:, 0])], dim=1)).squeeze(1)
        return scores


@pytest.mark.full
def test_a_cpp_service_scores_as_in_training(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 4, 4], [7, 300, 12]])
    root = str(tmp_path / "models")
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        model = session.distribute(Scorer(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
        model(ids).square().mean().backward()
        session.step(torch.optim.SGD(model.parameters(), lr=0.1))
        session.publish("ctr", root=root, model=model, example=(ids,))
        model.eval()
        with torch.no_grad():
            expected = model(ids).tolist()
    exported = torch.export.load(io.BytesIO(load_program(root, "ctr", 1)))
    exported.example_inputs = ((ids,), {})  # as docs/serving.md has it
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    service = build_torch_program(SOURCE, tmp_path / "online_inference", "-DASIO_STANDALONE")
    with sr.local_serving("ctr", root=root) as serving:
        ((host, port),) = fetch_view(serving.addresses, deadline_sec=5.0).endpoints[0]
        command = [str(service), str(package), f"{host}:{port}", "16384", "ctr@1", "ads/first=4", "ads/tags=4"]
        lines = "".join(" ".join(map(str, row)) + "\n" for row in ids.tolist())
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        np.testing.assert_allclose([float(line) for line in done.stdout.split()], expected, rtol=1e-5, atol=1e-6)
        for arguments, words in (
            ([*command[:4], "ctr@9", *command[5:]], "NotFound"),
            ([*command[:5], "ads/tags"], "table 'ads/tags'; allowed: NAMESPACE/TABLE=DIM"),
            (command[:5], "arguments; allowed: PACKAGE HOST:PORT"),
        ):
            refused = subprocess.run(arguments, input=lines, capture_output=True, text=True, timeout=600, check=False)
            assert refused.returncode == 1
            assert words in refused.stderr
