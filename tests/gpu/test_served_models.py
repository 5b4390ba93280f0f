"""Served programs on a CUDA device: the scores of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
import sparserow as sr
from scored_program import batch, publish_scorer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BATCHES, ROWS = 5, 64


def test_scores_on_cuda_are_those_of_the_host(tmp_path: Path) -> None:
    root = str(tmp_path)
    scores = publish_scorer(root, BATCHES, ROWS)
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
    ):
        for cache in (None, sr.LookupCache(1 << 20, ttl_ms=3_600_000)):
            with sr.ServedModel(client, root, device="cuda", cache=cache) as served:
                for _ in range(2):
                    for seed, expected in enumerate(scores):
                        out = served(*batch(seed, ROWS))
                        assert out.is_cuda
                        torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
                assert (served.stats().cache_hits > 0) == (cache is not None)
