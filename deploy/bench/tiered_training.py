"""The part of ``bench tiers`` that trains: a DLRM over a store with an SSD, against one all in memory.

All its features look up one table, by the keys of the benchmark. Both stores are served from this process, so their
threads share its CPUs with the training, as those of a shard on the same machine do. Batches are prefetched. The
contenders take turns in blocks: in memory, with the SSD and hints, with the SSD alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...cpp_ext import _client, _server
from ...proto.errors import FailedPrecondition
from ...proto.optim import Adagrad
from ...proto.schema import TableSchema
from ...worker.api.session import Session
from ...worker.layers.deferred import deferred
from ...worker.models import mlp
from ...worker.session.session_core import SessionCore
from ...worker.session.session_parts import Placement
from .harness import Figure, median
from .processes import SLOT_COUNT

LIMIT = 0.6
DEPTH = 2
_NUMBERS = 13
_JOB = 1

Draw = Callable[[], NDArray[np.int64]]
Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TrainingSize:
    """The sizes of the training.

    Args:
        batch: the number of samples of a step.
        features: the number of ids of a sample.
        blocks: the number of turns of each contender; the first is a warm-up where there are more.
        steps: the number of measured steps of a block.
        hints: the number of batches beyond the prefetched ones that are announced to the shard.
    """

    batch: int
    features: int
    blocks: int
    steps: int
    hints: int


class _SharedDLRM(nn.Module):
    """DLRM, whose features all look up one table: numbers (B, n) and keys (B, features) become logits (B)."""

    def __init__(self, features: int, rows: int, dim: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, dim)
        self.bottom = mlp([_NUMBERS, 256, 64, dim], activate_last=True)
        self.register_buffer("pairs", torch.triu_indices(features + 1, features + 1, offset=1), persistent=False)
        self.pairs: Tensor
        self.top = mlp([self.pairs.shape[1] + dim, 256, 1])

    def forward(self, numbers: Tensor, keys: Tensor) -> Tensor:
        below = self.bottom(numbers)
        vectors = torch.cat([below[:, None], self.rows(keys)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([below, products], dim=1)).squeeze(1)
        return logits


class _Catalog:
    """A catalog of tables for a store that has its one table already."""

    def __init__(self, table_id: int) -> None:
        self._table_id = table_id

    def create_table(self, schema: TableSchema) -> TableSchema:
        return replace(schema, id=self._table_id)

    def list_tables(self, namespace: str = "") -> tuple[TableSchema, ...]:
        del namespace
        return ()

    def drop_table(self, namespace: str, name: str) -> None:
        raise FailedPrecondition(f"table {namespace}/{name}: the table cannot be dropped during the benchmark")

    def close(self) -> None:
        """Does nothing, because there is nothing to close."""


@contextmanager
def _session(store: _server.Store, table_id: int, namespace: str) -> Iterator[Session]:
    """Yields a session of a synchronous job of one worker, on a shard that serves this store."""
    server = _server.Server(store, io_threads=2)
    owner = np.zeros(SLOT_COUNT, np.uint16)
    server.set_route(1, owner)
    server.set_job(_JOB, namespace, 0, [(0, 1, 0)])
    client = _client.Client(
        shards=[("127.0.0.1", server.port)], slot_owner=owner, route_epoch=1, job_id=_JOB, worker_epoch=1
    )
    native = _client.NativeSession(
        client.shards, first_step=0, first_sequence=1, clocked=True, grad_sum=False, deadline_ms=120_000
    )
    try:
        with Session(SessionCore(native, _Catalog(table_id), Placement(namespace=namespace))) as session:
            yield session
    finally:
        server.stop()


@dataclass
class _Runner:
    """One contender: its passes over batches, and their measurements."""

    session: Session
    step: Callable[[Batch], None]
    store: _server.Store
    hints: int
    seconds: list[float] = field(default_factory=list)  # seconds of a step, by block
    misses: list[float] = field(default_factory=list)  # number of keys of a step that were looked for on the SSD

    def run(self, batches: list[Batch], dropped: int) -> None:
        """Runs one block; its first steps, for which nothing was prefetched, are not measured."""
        began, before = 0.0, 0.0
        for number, batch in enumerate(self.session.prefetch(batches, depth=DEPTH, hints=self.hints, ids=_ids)):
            if number == dropped:
                began, before = time.perf_counter(), self._missed()
            self.step(batch)
        measured = len(batches) - dropped
        self.seconds.append((time.perf_counter() - began) / measured)
        self.misses.append((self._missed() - before) / measured)

    def _missed(self) -> float:
        stats = self.store.tier_stats()
        return 0.0 if stats is None else float(stats["misses"])


def _ids(batch: Batch) -> dict[str, Tensor]:
    return {"rows": batch[1]}


def _training_step(session: Session, shape: tuple[int, int], size: TrainingSize) -> Callable[[Batch], None]:
    rows, dim = shape
    torch.manual_seed(0)
    with deferred(min_rows=1):
        model = _SharedDLRM(size.features, rows, dim)
    session.distribute(model, optimizer=Adagrad(lr=0.01), min_rows=1)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> None:
        numbers, keys, labels = batch
        nn.functional.binary_cross_entropy_with_logits(model(numbers, keys), labels).backward()
        session.step(dense)

    return step


def measure_training(
    engine: str,
    plain: _server.Store,
    tiered: _server.Store,
    table_id: int,
    shape: tuple[int, int],
    size: TrainingSize,
    draw: Draw,
) -> Sequence[Figure]:
    """Returns the samples per second of each contender.

    Args:
        engine: the name of the tiered store's SSD engine, for the figures.
        plain: a store all in memory, whose table ``table_id`` has Adagrad and ``shape``.
        tiered: a store with the same rows, most of them on an SSD.
        table_id: the id of the table in both.
        shape: rows and columns of the table.
        size: the sizes of the training.
        draw: returns the keys (batch, features) of a new batch.
    """
    dropped = DEPTH + size.hints + 2
    random = torch.Generator().manual_seed(0)

    def batches() -> list[Batch]:
        return [
            (
                torch.rand(size.batch, _NUMBERS, generator=random),
                torch.from_numpy(draw()),
                torch.randint(0, 2, (size.batch,), generator=random).float(),
            )
            for _ in range(dropped + size.steps)
        ]

    with ExitStack() as stack:
        in_memory = stack.enter_context(_session(plain, table_id, "memory"))
        on_ssd = stack.enter_context(_session(tiered, table_id, "ssd"))
        ssd_step = _training_step(on_ssd, shape, size)
        runners = {
            "memory": _Runner(in_memory, _training_step(in_memory, shape, size), plain, 0),
            "hints": _Runner(on_ssd, ssd_step, tiered, size.hints),
            "no hints": _Runner(on_ssd, ssd_step, tiered, 0),
        }
        for block in range(size.blocks):
            for name in sorted(runners, reverse=block % 2 == 1):
                # The batches are new, because rows of another block's batches are in memory by now.
                runners[name].run(batches(), dropped)
    warm = 1 if size.blocks > 1 else 0
    rates = {name: size.batch / median(runner.seconds[warm:]) for name, runner in runners.items()}
    title, unit = f"{engine}: DLRM step, {size.batch:,} samples of {size.features} ids, prefetch {DEPTH}", "samples/s"
    return [
        Figure(f"{title}: all in memory", rates["memory"], unit),
        Figure(f"{title}: SSD, {size.hints} hints", rates["hints"], unit, LIMIT, rates["hints"] / rates["memory"]),
        Figure(f"{title}: SSD, no hints", rates["no hints"], unit, None, rates["no hints"] / rates["memory"]),
        *(
            Figure(
                f"{title}: SSD, {name}: missed",
                float(np.mean(runners[name].misses[warm:])),
                "keys/step",
                higher_is_better=False,
            )
            for name in ("hints", "no hints")
        ),
    ]
