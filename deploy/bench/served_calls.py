"""Times a call of a served model on a device: with its rows sent each time, and with all of them kept there.

The reference of the same run is the same arithmetic by torch, with the rows of all tables in one matrix on the device
and the ids sent: what a call would take if it knew where each row lies. A part of ``bench gpu``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...proto.optim import SGD
from ...serving.client.client import ServingClient
from ...serving.inference.inference import ServedModel
from ...serving.inference.lookup_cache import LookupCache
from ...worker.api.connect import connect
from ..launch.local_cluster import local_cluster
from ..launch.local_serving import local_serving
from .harness import Figure

__all__ = ["FULL", "QUICK", "Calls", "measure_served_calls"]

MOST_MS = 0.6  # of a call whose rows are pulled
MOST_MS_KEPT = 0.25  # of one whose rows are all on the device
_TTL_MS = 3_600_000
_DROPPED = 20


@dataclass(frozen=True)
class Calls:
    """The calls of one model.

    Attributes:
        tables: of the model; a call has one id of each for each sample.
        rows: of each table.
        dim: columns of a row.
        batch: samples of a call.
        repetitions: calls that are timed.
    """

    tables: int
    rows: int
    dim: int
    batch: int
    repetitions: int

    @property
    def name(self) -> str:
        """What the figures say of the calls."""
        return f"gpu, served call, {self.tables} x {self.batch} keys x {self.dim}"


FULL = (Calls(1, 200_000, 64, 2000, 400), Calls(26, 20_000, 16, 512, 400))
QUICK = (Calls(1, 500, 64, 50, 30), Calls(26, 100, 16, 8, 30))


class _Scorer(nn.Module):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(calls.rows, calls.dim) for _ in range(calls.tables))
        self.head = nn.Linear(calls.tables * calls.dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, number]) for number, table in enumerate(self.tables)]
        out: Tensor = self.head(torch.cat(rows, dim=1)).squeeze(1)
        return out


def measure_served_calls(calls: Calls, device: torch.device, finish: Callable[[torch.device], None]) -> list[Figure]:
    """Returns the median and the 99th percentile of each kind of call, in milliseconds.

    Args:
        calls: what is called.
        device: of the program.
        finish: waits until a device has done all that was queued.
    """
    drawn = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, calls.rows, (calls.batch, calls.tables), generator=drawn) for _ in range(8)]
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        with local_cluster(shards=1) as cluster, connect(cluster.address, "bench-served") as session:
            model = session.distribute(_Scorer(calls), optimizer=SGD(lr=0.1), min_rows=1)
            session.publish("ctr", root=root, model=model, example=(batches[0],))
        host = torch.device("cpu")
        room = 4 * calls.tables * calls.rows * (calls.dim * 4 + 16)  # sets are filled unevenly
        with local_serving("ctr", root=root) as serving, ServingClient(serving.addresses) as client:
            for name, where, cache in (
                ("on the host", host, None),
                ("rows sent", device, None),
                ("rows kept", device, LookupCache(room, ttl_ms=_TTL_MS)),
            ):
                with ServedModel(client, root, device=where, cache=cache, refresh_sec=None) as served:
                    for batch in batches:
                        served(batch)
                    before = served.stats()
                    taken[name] = _times(served, batches, calls.repetitions, partial(finish, where))
                    missed = served.stats().cache_misses - before.cache_misses
        taken["rows in one matrix of torch"] = _times(
            _one_matrix(calls, device), batches, calls.repetitions, partial(finish, device)
        )
    reference = _share(taken["rows in one matrix of torch"], 0.5)
    figures = [Figure(f"{calls.name}: ids that were not kept", missed / calls.repetitions, "ids/call")]
    limits = {"rows sent": MOST_MS, "rows kept": MOST_MS_KEPT}
    for name, seconds in taken.items():
        for share in (0.5, 0.99):
            ms = _share(seconds, share)
            limit = limits.get(name) if share == 0.5 else None
            figures.append(Figure(f"{calls.name}: {name}, p{share * 100:.0f}", ms, "ms", limit, higher_is_better=False))
    kept = _share(taken["rows kept"], 0.5)
    figures.append(
        Figure(f"{calls.name}: rows kept, of one matrix", kept, "ms", None, kept / reference, higher_is_better=False)
    )
    return figures


def _times(
    call: Callable[[Tensor], object], batches: list[Tensor], repetitions: int, finish: Callable[[], None]
) -> list[float]:
    """Returns the milliseconds of each call, in ascending order."""
    taken = []
    for number in range(_DROPPED + repetitions):
        began = time.perf_counter()
        call(batches[number % len(batches)])
        finish()
        taken.append((time.perf_counter() - began) * 1e3)
    return sorted(taken[_DROPPED:])


def _share(ascending: list[float], share: float) -> float:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)]


def _one_matrix(calls: Calls, device: torch.device) -> Callable[[Tensor], Tensor]:
    matrix = torch.zeros(calls.tables * calls.rows, calls.dim, device=device)
    firsts = (torch.arange(calls.tables) * calls.rows).to(device)
    head = nn.Linear(calls.tables * calls.dim, 1).to(device)

    def call(ids: Tensor) -> Tensor:
        with torch.no_grad():
            places = (ids.to(device, non_blocking=True) + firsts).reshape(-1)
            out: Tensor = head(matrix.index_select(0, places).view(ids.shape[0], -1))
            return out

    return call
