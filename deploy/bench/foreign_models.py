"""Measures samples per second of other libraries' models, all local, and with their embeddings on shards.

    python -m sparserow.deploy.bench.foreign_models

A share below its goal (0.8 of the local speed, 0.95 with ``session.prefetch``) is shown as missed.

It is not part of ``sparserow bench``, because it needs deepctr-torch, or torchrec with its fbgemm
(docs/foreign-models.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as Grid
from torch import nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

import sparserow as sr

COLUMNS, DIM, HIDDEN, BATCH = 20, 8, (64, 64), 1024
WARM = 5  # batches before the clock starts, because the lookups of the first are traced
WAYS = ("local", "distributed", "distributed, prefetch")
GOALS = (0.8, 0.95)  # of the local speed, without prefetch and with
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        model: a new model.
        features: makes the model's arguments from ids (n, COLUMNS).
        loss: the loss of the model's output (n) and labels (n).
    """

    model: nn.Module
    features: Callable[[torch.Tensor], tuple[Any, ...]]
    loss: Loss


def deepfm(rows: int) -> Subject:
    """Returns DeepFM of DeepCTR-Torch, whose batch is one float matrix, as its ``fit`` makes it."""
    from deepctr_torch.inputs import SparseFeat
    from deepctr_torch.models import DeepFM

    columns = [SparseFeat(f"c{index}", rows, embedding_dim=DIM) for index in range(COLUMNS)]
    model = DeepFM(columns, columns, dnn_hidden_units=HIDDEN, l2_reg_linear=0, l2_reg_embedding=0)
    model.regularization_weight.clear()
    return Subject(model, lambda ids: (ids.float(),), binary_cross_entropy)


def dcn(rows: int) -> Subject:
    """Returns DCN of DeepCTR-Torch, whose batch is one float matrix."""
    from deepctr_torch.inputs import SparseFeat
    from deepctr_torch.models import DCN

    columns = [SparseFeat(f"c{index}", rows, embedding_dim=DIM) for index in range(COLUMNS)]
    model = DCN(columns, columns, dnn_hidden_units=HIDDEN, l2_reg_linear=0, l2_reg_embedding=0, l2_reg_cross=0)
    model.regularization_weight.clear()
    return Subject(model, lambda ids: (ids.float(),), binary_cross_entropy)


def din(rows: int) -> Subject:
    """Returns DIN of DeepCTR-Torch: a user, an item, a history of items, and one float matrix a batch."""
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN

    item = SparseFeat("item", rows, embedding_dim=DIM)
    items = SparseFeat("hist_item", rows, embedding_dim=DIM, embedding_name="item")
    history = VarLenSparseFeat(items, maxlen=COLUMNS - 2, length_name="seq_length")
    columns = [SparseFeat("user", rows, embedding_dim=DIM), item, history]
    model = DIN(columns, ["item"], dnn_hidden_units=HIDDEN, att_weight_normalization=True, l2_reg_embedding=0)
    model.regularization_weight.clear()

    def features(ids: torch.Tensor) -> tuple[Any, ...]:
        # Key 0 of a history is padding. The last column is the length of each history.
        known = ids.clamp_min(1)
        return (torch.cat([known, torch.full((len(ids), 1), COLUMNS - 2)], dim=1).float(),)

    return Subject(model, features, binary_cross_entropy)


class UserItemTowers(nn.Module):
    """A tower of user columns and one of item columns, in plain torch; the logit is the product of their vectors."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.users = nn.ModuleList(nn.Embedding(rows, DIM) for _ in range(COLUMNS // 2))
        self.items = nn.ModuleList(nn.Embedding(rows, DIM) for _ in range(COLUMNS // 2))
        widths = (DIM * (COLUMNS // 2), *HIDDEN)
        self.user_tower, self.item_tower = _tower(widths), _tower(widths)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits (n) for ids (n, COLUMNS)."""
        rows = [table(ids[:, index]) for index, table in enumerate([*self.users, *self.items])]
        half = len(self.users)
        user, item = torch.cat(rows[:half], dim=1), torch.cat(rows[half:], dim=1)
        scores: torch.Tensor = (self.user_tower(user) * self.item_tower(item)).sum(dim=1)
        return scores


def _tower(widths: Sequence[int]) -> nn.Sequential:
    layers = [layer for low, high in pairwise(widths) for layer in (nn.Linear(low, high), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def two_tower(rows: int) -> Subject:
    """Returns two towers in plain torch, whose batch is a matrix of ids."""
    return Subject(UserItemTowers(rows), lambda ids: (ids,), binary_cross_entropy_with_logits)


def dlrm(rows: int) -> Subject:
    """Returns DLRM of torchrec, whose batch has a keyed jagged tensor."""
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"c{index}" for index in range(COLUMNS)]
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=DIM) for name in names
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))

    def features(ids: torch.Tensor) -> tuple[Any, ...]:
        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        return torch.ones(len(ids), 1), KeyedJaggedTensor(keys=names, values=ids.t().flatten(), lengths=lengths)

    model = DLRM(bags, 1, dense_arch_layer_sizes=[HIDDEN[0], DIM], over_arch_layer_sizes=[HIDDEN[1], 1])
    return Subject(model, features, binary_cross_entropy_with_logits)


MODELS = {
    "DeepFM (DeepCTR-Torch)": ("deepctr_torch", deepfm),
    "DCN (DeepCTR-Torch)": ("deepctr_torch", dcn),
    "DIN (DeepCTR-Torch)": ("deepctr_torch", din),
    "two towers (torch)": ("torch", two_tower),
    "DLRM (torchrec)": ("torchrec", dlrm),
}


@dataclass(frozen=True)
class Log:
    """Random ids (batches, BATCH, COLUMNS) and labels; each iteration makes new batches, as a loader does."""

    ids: torch.Tensor
    labels: torch.Tensor
    features: Callable[[torch.Tensor], tuple[Any, ...]]

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for ids, labels in zip(self.ids, self.labels, strict=True):
            yield self.features(ids), labels


def speed(
    subject: Subject, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Any, torch.Tensor]]
) -> float:
    """Returns the samples per second of a training loop, without its first batches."""
    model.train()
    began, samples = 0.0, 0
    for index, (features, labels) in enumerate(batches):
        if index == WARM:
            began, samples = time.perf_counter(), 0
        optimizer.zero_grad()
        subject.loss(model(*features).flatten(), labels).backward()
        optimizer.step()
        samples += len(labels)
    return samples / (time.perf_counter() - began)


def measure(make: Callable[[int], Subject], address: str, namespace: str, *, rows: int, steps: int) -> list[float]:
    """Returns the samples per second of each of ``WAYS``, measured one after another."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(rows, (steps + WARM, BATCH, COLUMNS), generator=draw)
    labels = torch.randint(2, (steps + WARM, BATCH), generator=draw).float()
    subject = make(rows)
    dense: torch.optim.Optimizer = torch.optim.Adagrad(subject.model.parameters(), lr=0.01)
    found = [speed(subject, subject.model, dense, Log(ids, labels, subject.features))]
    for is_ahead in (False, True):
        with sr.connect(address, namespace=f"{namespace}-{int(is_ahead)}") as session:
            subject = make(rows)
            model = session.distribute(subject.model, optimizer=sr.optim.Adagrad(lr=0.01), min_rows=rows)
            dense = session.wrap(torch.optim.Adagrad(model.parameters(), lr=0.01))
            log = Log(ids, labels, subject.features)
            batches: Iterable[Any] = session.prefetch(log, depth=2) if is_ahead else log
            found.append(speed(subject, model, dense, batches))
    return found


def main() -> None:
    """Prints a table with the median of some repetitions, and the share of local speed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 100_000], help="ids of a column")
    parser.add_argument("--steps", type=int, default=60, help=f"batches of {BATCH} samples")
    parser.add_argument("--repetitions", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    grid = Grid(title=f"samples a second: {COLUMNS} columns, dim {DIM}, batches of {BATCH}, 1 shard, 1 thread of torch")
    for title in ("model", "ids of a column", *WAYS):
        grid.add_column(title, justify="right")
    with sr.local_cluster(shards=1) as cluster:
        for title, (module, make) in MODELS.items():
            if importlib.util.find_spec(module) is None:
                grid.add_row(title, f"{module} is not installed")
                continue
            for rows in asked.rows:
                runs = [
                    measure(make, cluster.address, f"{make.__name__}-{rows}-{run}", rows=rows, steps=asked.steps)
                    for run in range(asked.repetitions)
                ]
                speeds = [statistics.median(each) for each in zip(*runs, strict=True)]
                shares = [each / speeds[0] for each in speeds[1:]]
                shown = [f"{speeds[0]:,.0f}"]
                for each, share, goal in zip(speeds[1:], shares, GOALS, strict=True):
                    shown.append(f"{each:,.0f} ({share:.2f}{'' if share >= goal else ', missed'})")
                grid.add_row(title, f"{rows:,}", *shown)
    Console(width=140).print(grid)


if __name__ == "__main__":
    main()
