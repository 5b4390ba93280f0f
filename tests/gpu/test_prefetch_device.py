"""Prefetch to a CUDA device: batches arrive there whole, and their lookups find the rows that were pulled ahead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
import sparserow as sr

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_batches_are_copied_beside_the_training() -> None:
    batches = [torch.randint(0, 500, (64, 3), generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    with sr.InProcessCluster(shards=2).connect("device") as session:
        model = nn.ModuleList(nn.Embedding(500, 8) for _ in range(3))
        session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        for given, batch in zip(batches, session.prefetch(batches, depth=3, device="cuda"), strict=True):
            assert batch.is_cuda
            assert torch.equal(batch.cpu(), given)
            sum(table(batch[:, column]).square().sum() for column, table in enumerate(model)).backward()
            session.step()
        stats = session.stats()
    assert (stats.steps_committed, stats.lookups_missed) == (20, 0)
    assert stats.rows_prefetched > 0


@pytest.mark.parametrize("depth", [0, 2])
def test_ids_that_a_forward_changes_in_place_are_looked_up_as_they_are(depth: int) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(60, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            ids.remainder_(7)
            return self.table(ids)

    given = [torch.arange(5) + 10 + step for step in range(4)]
    with sr.InProcessCluster(shards=1).connect("in-place") as session:
        model = Wrapped()
        weights = model.table.weight.detach().clone()
        session.distribute(model, optimizer=sr.optim.SGD(lr=0.0), min_rows=1, carry_weights=True).to("cuda")
        batches = [ids.clone() for ids in given]
        for ids, batch in zip(
            given, session.prefetch(batches, depth=depth, device="cuda") if depth else batches, strict=True
        ):
            rows = model(batch.cuda())
            rows.sum().backward()
            session.step()
            torch.testing.assert_close(rows.detach().cpu(), weights[ids % 7])
