"""Steps whose lookups are made by the kernels have the rows of the host: on CUDA, or under Triton's interpreter.

Without a CUDA device the lookups of layers on the host are made as those on devices are.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
import sparserow as sr
from sparserow.cpp_ext.device import lookup_math
from sparserow.cpp_ext.torch_ops import device_lookups_on_host

TABLES, ROWS, DIM, BATCH, STEPS = 3, 20, 4, 5, 4
ON_HOST = "where the host has the offsets"
# The kind of lookup, and whether the pack's order of ids serves the sums.
KINDS = {"rows": True, "sum": True, "mean": True, "rows, padding": False, "sum, offsets": ON_HOST, "max": False}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, padding = kind, 0 if "padding" in kind else None
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS, DIM, padding_idx=padding)
            if "rows" in kind
            else nn.EmbeddingBag(ROWS, DIM, mode=kind.partition(",")[0])
            for _ in range(TABLES)
        )

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        if "offsets" in self.kind:
            outs = [table(each.reshape(-1), offsets) for table, each in zip(self.tables, ids, strict=True)]
        else:
            outs = [table(each) for table, each in zip(self.tables, ids, strict=True)]
        return torch.stack([(at + 1) * out.square().sum() for at, out in enumerate(outs)]).sum()


def rows_after(kind: str, device: torch.device) -> list[Tensor]:
    """Returns the rows of all tables after some steps."""
    draw = torch.Generator().manual_seed(1)
    with sr.InProcessCluster(shards=2).connect("kernels") as session:
        torch.manual_seed(0)
        model = session.distribute(Net(kind), optimizer=sr.optim.SGD(lr=0.05), min_rows=1, carry_weights=True)
        model = model.to(device)
        for _ in range(STEPS):
            ids = torch.randint(0, ROWS, (TABLES, BATCH, 3), generator=draw)
            model(ids.to(device), torch.tensor([0, 2, 2, 9]).to(device)).backward()
            session.step()
        return [torch.from_numpy(session.table(f"tables.{at}").pull(range(ROWS))) for at in range(TABLES)]


@pytest.mark.parametrize(("kind", "has_order"), KINDS.items(), ids=KINDS)
def test_rows_are_those_of_the_host(
    kind: str, has_order: bool | str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums go through a row's ids as the pack has them, where each is known to add to its row; else they are sorted."""
    wanted = rows_after(kind, torch.device("cpu"))
    orders: list[bool] = []
    sum_entries = lookup_math.sum_entries

    def spy(entries: Any, rows: int, out: Tensor, order: Any = None) -> None:
        orders.append(order is not None)
        sum_entries(entries, rows, out, order)

    monkeypatch.setattr(lookup_math, "sum_entries", spy)
    with nullcontext() if device.type == "cuda" else device_lookups_on_host():
        found = rows_after(kind, device)
    assert len(orders) >= STEPS - 1  # layers of the first forward look up by themselves
    assert orders[-1] is (device.type == "cpu" if has_order == ON_HOST else has_order)
    for one, other in zip(found, wanted, strict=True):
        if device.type == "cpu":
            assert torch.equal(one, other)
        else:  # kernels on CUDA fuse a multiplication and an addition
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
