"""What a lookup refuses, on the host and on a device alike, by the name of the argument."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.deploy.bench.counting_device import device

ROWS, DIM = 20, 4
FLAT = torch.tensor([1, 2, 3, 4, 5])


class Bag(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=last)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(ids, offsets)


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=1).connect("refused") as session:
        yield session


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("last", "offsets", "text"),
    [
        (True, torch.tensor([0, 2, 4]), r"offsets\[2\].*4.* is not allowed; allowed: 5, the number of ids"),
        (
            True,
            torch.tensor([0, 2, 6]),
            r"offsets\[2\]: 6 is not allowed; allowed: 0 first, then not falling, at most 5",
        ),
        (False, torch.tensor([0.0, 2.9]), r"offsets\.dtype: .* is not allowed; allowed: int64, int32"),
        (False, torch.tensor([False, True]), r"offsets\.dtype: .* is not allowed; allowed: int64, int32"),
        (False, torch.tensor([1, 2]), r"offsets\[0\]: 1 is not allowed"),
        (False, torch.tensor([0, 3, 2]), r"offsets\[2\]: 2 is not allowed"),
    ],
    ids=["before the end", "beyond the end", "floats", "booleans", "first", "falling"],
)
def test_offsets(session: sr.Session, where: str, train: bool, last: bool, offsets: Tensor, text: str) -> None:
    model = session.distribute(Bag(last), optimizer=sr.optim.SGD(lr=0.1), min_rows=1).train(train)
    if where == "device":
        model = model.to(device())
    with pytest.raises(sr.errors.InvalidArgument, match=text):
        model(FLAT, offsets)
    allowed = torch.tensor([0, 2, 5]) if last else torch.tensor([0, 2])
    assert model(FLAT, allowed).shape == (2, DIM)
    assert model(FLAT.to(torch.int32), allowed.to(torch.int32)).shape == (2, DIM)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("ids", [torch.tensor([1.0, 2.7]), torch.tensor([True, False])], ids=["floats", "booleans"])
def test_ids(session: sr.Session, where: str, ids: Tensor) -> None:
    model = session.distribute(
        nn.ModuleDict({"one": nn.Embedding(ROWS, DIM)}), optimizer=sr.optim.SGD(lr=0.1), min_rows=1
    )
    place = torch.device("cpu") if where == "host" else device()
    with pytest.raises(sr.errors.InvalidArgument, match=r"ids\.dtype: .* is not allowed; allowed: int64, int32"):
        model.to(place)["one"](ids.to(place))
