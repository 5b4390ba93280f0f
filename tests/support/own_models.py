"""Models of one's own for jobs in tests. They use torch alone, as a user's file does."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn


class Shop(nn.Module):
    """A target item that weighs a history of items, beside a brand and an age: two logits, of a click and of a sale.

    Args:
        items: the number of items.
        brands: the number of brands.
        dim: the width of embeddings.
        record: the folder to which each process writes the clicks' logits of its training steps; "": none.
    """

    def __init__(self, items: int, brands: int, dim: int = 8, record: str = "") -> None:
        super().__init__()
        self.item = nn.Embedding(items, dim)
        self.seen = nn.Embedding(items, dim)  # of the history; the job ties it to the items
        self.brand = nn.Embedding(brands, dim)
        for table in (self.item, self.seen, self.brand):
            nn.init.normal_(table.weight, std=0.3)
        self.score = nn.Linear(3 * dim, 1)
        self.click = nn.Sequential(nn.Linear(3 * dim + 1, 16), nn.ReLU(), nn.Linear(16, 1))
        self.sale = nn.Linear(3 * dim + 1, 1)
        self.logits: list[Tensor] = []
        self.record = record

    def forward(self, age: Tensor, item: Tensor, history: tuple[Tensor, Tensor], brand: Tensor) -> dict[str, Tensor]:
        values, offsets = history
        lengths = offsets.diff()
        target, seen = self.item(item), self.seen(values)
        sample = torch.repeat_interleave(torch.arange(item.shape[0]), lengths, output_size=values.shape[0])
        pairs = torch.cat([target[sample], seen, target[sample] * seen], dim=1)
        weighted = torch.sigmoid(self.score(pairs)) * seen
        interest = torch.zeros_like(target).index_add(0, sample, weighted)
        inputs = torch.cat([target, interest, self.brand(brand), age[:, None]], dim=1)
        out = {"click": self.click(inputs).squeeze(1), "sale": self.sale(inputs).squeeze(1)}
        if self.training:
            logits = out["click"].detach().clone()
            self.logits.append(logits)
            if self.record:
                with (Path(self.record) / str(os.getpid())).open("ab") as file:
                    file.write(logits.numpy().tobytes())
        return out


class Factors(nn.Module):
    """A matrix factorization: it has tables alone."""

    def __init__(self, rows: int, dim: int = 4) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(rows, dim), nn.Embedding(rows, dim)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(dim=1)


class Forgetful(Factors):
    """A model that learns its users, and cuts the gradient of its items off."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) + self.item(item).detach()).sum(dim=1)


class Noisy(nn.Module):
    """A tower with batch normalisation and dropout, which draws numbers in eval mode as well.

    Args:
        rows: the number of users, and of items.
        record: the folder to which each process writes the logits of its training steps; "": none.
    """

    def __init__(self, rows: int, record: str = "") -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(rows, 4), nn.Embedding(rows, 4)
        layers = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.top = nn.Sequential(*layers)
        self.record = record

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([self.user(user), self.item(item)], dim=1)
        out: Tensor = self.top(rows + 0.01 * torch.randn(rows.shape))[:, 0]
        if self.training and self.record:
            with (Path(self.record) / str(os.getpid())).open("ab") as file:
                file.write(out.detach().numpy().tobytes())
        return out
