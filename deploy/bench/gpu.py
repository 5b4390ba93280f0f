"""``bench gpu``: measures a step whose model is on a device and whose rows are on a shard.

The model of ``bench train`` runs in blocks of steps that take turns: with its rows on one shard process of this
machine and a prefetch, with its tables on the device, and as torch's own ``EmbeddingBag(sparse=True)`` there. Beside
them run alone in the same blocks: the dense tower on the device, the pull and push of the same ids on the shard, in one
frame each, and a step whose tables are one matrix of torch's. A step that hides the shorter part behind the longer one
takes as long as the longer one. The dense part runs under DDP in a job of one rank as well, by NCCL and by gloo, and
the whole model in fbgemm's table-batched embeddings where they are. On CUDA torch's profiler says how long the device
is busy.

Then a served model is called (served_calls.py). Without a CUDA device the command refuses; any device that has a link
(cpp_ext/device/link.py) can be given to :func:`run_on`, as a test does with one that counts what crosses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ...cpp_ext import _client
from ...cpp_ext.device.link import link_of
from ...proto.errors import FailedPrecondition
from ...proto.optim import Adagrad
from ...proto.schema import Constant, Placement, Table
from ...worker.api.connect import connect
from ...worker.api.session import Session
from ..launch.local_cluster import local_cluster
from . import served_calls
from .click_model import DIM, TABLES, PooledClickModel, Size, ZipfBatches, mlp_of_click_model
from .harness import Figure, median
from .peers.fbgemm_tables import FbgemmTables, lack_of_fbgemm
from .reduced_tower import backends_of, job_of_one_rank

__all__ = ["FULL", "QUICK", "run_gpu", "run_on"]

DEPTH = 2
LIMIT_OF_LONGER_PART = 1.3
LEAST_OF_TORCH = 2.2  # of rows on a shard, with one id in a bag
MOST_OF_ONE_MATRIX = 1.5  # of tables on the device
_BLOCKS = 5
_DROPPED = DEPTH + 2

FULL = Size(rows=100_000, batch=4096, hot=(1, 10), repetitions=50)
QUICK = Size(rows=1_000, batch=64, hot=(2,), repetitions=10)


@dataclass(frozen=True)
class OnHost:
    """A batch whose ids stay on the host.

    Attributes:
        ids: (tables, batch, hot) int64.
        labels: (batch) float32.
    """

    ids: Tensor
    labels: Tensor


def run_gpu(size: Size) -> list[Figure]:
    """Returns all figures; see the docstring of the module.

    Raises:
        FailedPrecondition: this machine has no CUDA device, or this torch finds none.
    """
    if not torch.cuda.is_available():
        raise FailedPrecondition(
            f"bench gpu: torch {torch.__version__} finds no CUDA device; a device is needed, as nothing is emulated"
        )
    return run_on(size, torch.device("cuda", torch.cuda.current_device()))


def run_on(size: Size, device: torch.device) -> list[Figure]:
    """Returns all figures of a device.

    Args:
        size: rows, batch, ids of a bag in each case, and steps.
        device: a device for which a link is known.
    """
    figures: list[Figure] = []
    for hot in size.hot:
        figures += measure_steps(size, hot, device)
    for calls in served_calls.FULL if size == FULL else served_calls.QUICK:
        figures += served_calls.measure_served_calls(calls, device, _finish)
    return figures


def _finish(device: torch.device) -> None:
    """Waits until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def distributed(
    size: Size, device: torch.device, name: str, placement: Placement = "servers"
) -> Iterator[tuple[Session, nn.Module]]:
    """Gives the session and the model whose rows are on one shard process, or on the device; the model is there."""
    with local_cluster(shards=1) as cluster, connect(cluster.address, name) as session:
        torch.manual_seed(0)
        model = PooledClickModel(size.rows)
        model = session.distribute(
            model.to(device) if placement == "device" else model,
            optimizer=Adagrad(lr=0.05),
            min_rows=1,
            carry_weights=False,
            tables={"*": Table(init=Constant(0.01), placement=placement)},
        )
        yield session, model.to(device)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of a batch."""
    return nn.functional.binary_cross_entropy_with_logits(model(ids), labels)


def _rows_on_a_shard(session: Session, model: nn.Module, device: torch.device) -> Callable[[list[OnHost]], float]:
    """Returns what runs a block of steps; it returns the seconds of one step."""
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)

    def ids_of(batch: OnHost) -> dict[str, Tensor]:
        return {f"tables.{table}": batch.ids[table] for table in range(TABLES)}

    def run(batches: list[OnHost]) -> float:
        began = 0.0
        on_host = None if device.type == "cpu" else lambda batch: [batch.ids]
        ahead = session.prefetch(batches, DEPTH, ids=ids_of, device=device, on_host=on_host)
        for number, batch in enumerate(ahead):
            if number == _DROPPED:
                _finish(device)
                began = time.perf_counter()
            loss_of(model, batch.ids, batch.labels).backward()
            session.step(dense)
        _finish(device)
        return (time.perf_counter() - began) / (len(batches) - _DROPPED)

    return run


def _on_device(step: Callable[[Tensor, Tensor], None], device: torch.device) -> Callable[[list[OnHost]], float]:
    """Returns what runs a block of steps over batches that are on the device already."""

    def run(batches: list[OnHost]) -> float:
        there = [(batch.ids.to(device), batch.labels.to(device)) for batch in batches]
        began = 0.0
        for number, (ids, labels) in enumerate(there):
            if number == _DROPPED:
                _finish(device)
                began = time.perf_counter()
            step(ids, labels)
        _finish(device)
        return (time.perf_counter() - began) / (len(batches) - _DROPPED)

    return run


def step_of_session(session: Session, model: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """Returns a step of a session, given ids and labels."""
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(ids: Tensor, labels: Tensor) -> None:
        loss_of(model, ids, labels).backward()
        session.step(dense)

    return step


def _torch_step(size: Size, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    torch.manual_seed(0)
    model = PooledClickModel(size.rows).to(device)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    for table in model.tables:
        assert isinstance(table, nn.EmbeddingBag)
        table.sparse = device.type == "cuda"  # other devices may have no sparse gradients
    rows = torch.optim.Adagrad(list(model.tables.parameters()), lr=0.05)

    def step(ids: Tensor, labels: Tensor) -> None:
        loss_of(model, ids, labels).backward()
        for optimizer in (dense, rows):
            optimizer.step()
            optimizer.zero_grad()

    return step


def _one_matrix_step(size: Size, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Returns a step of torch's operations alone, whose tables are one matrix with Adagrad over unique rows."""
    torch.manual_seed(0)
    matrix = torch.full((TABLES * size.rows, DIM), 0.01).to(device)
    squares = torch.zeros(TABLES * size.rows, DIM).to(device)
    firsts = (torch.arange(TABLES) * size.rows).view(-1, 1, 1).to(device)
    mlp = mlp_of_click_model().to(device)
    dense = torch.optim.Adam(mlp.parameters(), lr=1e-3)

    def step(ids: Tensor, labels: Tensor) -> None:
        keys, places = torch.unique(ids + firsts, return_inverse=True)
        rows = matrix.index_select(0, keys).requires_grad_()
        pooled = rows.index_select(0, places.reshape(-1)).view(TABLES, size.batch, -1, DIM).sum(2)
        logits = mlp(pooled.transpose(0, 1).reshape(size.batch, -1)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        grads = rows.grad
        assert grads is not None
        with torch.no_grad():
            sums = squares.index_select(0, keys).addcmul_(grads, grads)
            squares.index_copy_(0, keys, sums)
            matrix.index_copy_(0, keys, rows.addcdiv(grads, sums.sqrt_().add_(1e-10), value=-0.05))
        dense.step()
        dense.zero_grad()

    return step


def _fbgemm_step(size: Size, device: torch.device) -> Callable[[Tensor, Tensor], None]:
    torch.manual_seed(0)
    tables, mlp = FbgemmTables(TABLES, size.rows, DIM, lr=0.05, device=device), mlp_of_click_model().to(device)
    dense = torch.optim.Adam(mlp.parameters(), lr=1e-3)

    def step(ids: Tensor, labels: Tensor) -> None:
        nn.functional.binary_cross_entropy_with_logits(mlp(tables(ids)).squeeze(1), labels).backward()
        dense.step()
        dense.zero_grad()

    return step


def dense_step(
    size: Size, device: torch.device, wrap: Callable[[nn.Module], nn.Module] = lambda tower: tower
) -> Callable[[Tensor, Tensor], None]:
    torch.manual_seed(0)
    tower = wrap(mlp_of_click_model().to(device))
    dense = torch.optim.Adam(tower.parameters(), lr=1e-3)
    pooled = torch.randn(size.batch, TABLES * DIM).to(device).requires_grad_()

    def step(_: Tensor, labels: Tensor) -> None:
        nn.functional.binary_cross_entropy_with_logits(tower(pooled).squeeze(1), labels).backward()
        dense.step()
        dense.zero_grad()
        pooled.grad = None

    return step


def _rows_alone(session: Session) -> Callable[[list[OnHost]], float]:
    """Returns what pulls and pushes the unique ids of each batch, those of all tables in one frame each."""
    names = [f"{session.namespace}/tables.{table}" for table in range(TABLES)]
    native = session.core.native

    def run(batches: list[OnHost]) -> float:
        unique = [[torch.from_numpy(np.unique(each.numpy())) for each in batch.ids] for batch in batches]
        began = time.perf_counter()
        for keys in unique:
            ids = [(each.data_ptr(), each.data_ptr(), tuple(each.shape), each.stride(), 8) for each in keys]
            pack = _client.LookupPack(list(zip(names, ids, strict=True)), train=True)
            sums = torch.zeros(pack.floats_of_sums)
            pack.stage([(part, -1) for part in range(len(names))], sums.data_ptr())
            native.count_staged()
            session.step()
        return (time.perf_counter() - began) / len(batches)

    return run


def measure_steps(size: Size, hot: int, device: torch.device) -> list[Figure]:
    """Returns the figures of training steps with ``hot`` ids in a bag; on the host nothing crosses."""
    source, link, lack = ZipfBatches(size, hot), link_of(device), _lack_of_fbgemm_on(device)
    is_cuda = device.type == "cuda"
    batches = [OnHost(*source.make()) for _ in range(max(size.repetitions // _BLOCKS, 2) + _DROPPED)]
    with (
        distributed(size, device, f"bench-gpu-{hot}") as (session, model),
        distributed(size, device, f"bench-gpu-{hot}-there", "device") as (session_there, model_there),
        job_of_one_rank(device) as reduced,
    ):
        runs: dict[str, Callable[[list[OnHost]], float]] = {
            "rows on a shard": _rows_on_a_shard(session, model, device),
            "torch EmbeddingBag": _on_device(_torch_step(size, device), device),
            "tables on the device": _on_device(step_of_session(session_there, model_there), device),
            "one matrix in torch": _on_device(_one_matrix_step(size, device), device),
            "dense part": _on_device(dense_step(size, device), device),
            "pull and push": _rows_alone(session),
        }
        for backend in backends_of(device):
            step = dense_step(size, device, lambda tower, backend=backend: reduced(tower, backend))  # type: ignore[misc]
            runs[f"dense part, {backend}"] = _on_device(step, device)
        if not lack:
            runs["fbgemm TBE"] = _on_device(_fbgemm_step(size, device), device)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        crossed: list[tuple[int, int, int]] = []
        for block in range(_BLOCKS + 1):
            for name, run in runs.items():
                before = _counts(link.crossings)
                taken = run(batches)
                if block == 0:
                    continue  # a warm-up
                seconds[name].append(taken)
                if name == "rows on a shard":
                    now = _counts(link.crossings)
                    crossed.append(tuple(b - a for a, b in zip(before, now, strict=True)))  # type: ignore[arg-type]
        busy_ms = {
            part: _busy_ms(runs[part], batches) for part in ("rows on a shard", "tables on the device") if is_cuda
        }
    times = {name: median(values) for name, values in seconds.items()}
    name = f"gpu {hot}-hot, {TABLES} tables x {size.rows} x {DIM}, batch {size.batch}, Zipf 1.05, 1 shard"
    longer = max(times["dense part"], times["pull and push"])
    rate, unit = size.batch / times["rows on a shard"], "samples/s"
    of_torch = times["torch EmbeddingBag"] / times["rows on a shard"]
    copies, there, back = (median([each[index] for each in crossed]) / len(batches) for index in range(3))
    busy = [
        Figure(f"{name}: {part}: the device is busy", value, "ms/step", higher_is_better=False)
        for part, value in busy_ms.items()
    ]
    peers = [
        Figure(f"{name}: dense part in a job of one rank, {backend}", times[f"dense part, {backend}"] * 1e3, "ms/step",
               None, times[f"dense part, {backend}"] / times["dense part"], higher_is_better=False)
        for backend in backends_of(device)
    ]  # fmt: skip
    if lack:
        print(f"bench gpu: no figure of fbgemm's TBE: {lack}")
    else:
        seconds_of_tbe = times["fbgemm TBE"]
        peers.append(Figure(f"{name}: fbgemm TBE on the device", size.batch / seconds_of_tbe, unit))
        peers.append(
            Figure(f"{name}: rows on a shard, of TBE", rate, unit, None, seconds_of_tbe / times["rows on a shard"])
        )
    return [
        *peers,
        Figure(f"{name}: torch EmbeddingBag on the device", size.batch / times["torch EmbeddingBag"], unit),
        Figure(
            f"{name}: rows on a shard, of torch",
            rate,
            unit,
            LEAST_OF_TORCH if hot == 1 else None,
            of_torch,
        ),
        *busy,
        Figure(
            f"{name}: tables on the device, of one matrix in torch",
            times["tables on the device"] * 1e3,
            "ms/step",
            MOST_OF_ONE_MATRIX,
            times["tables on the device"] / times["one matrix in torch"],
            higher_is_better=False,
        ),
        Figure(
            f"{name}: tables on the device, of torch",
            size.batch / times["tables on the device"],
            unit,
            None,
            times["torch EmbeddingBag"] / times["tables on the device"],
        ),
        Figure(f"{name}: dense part alone", times["dense part"] * 1e3, "ms/step", higher_is_better=False),
        Figure(f"{name}: pull and push alone", times["pull and push"] * 1e3, "ms/step", higher_is_better=False),
        Figure(
            f"{name}: step, of the longer part",
            times["rows on a shard"] * 1e3,
            "ms/step",
            LIMIT_OF_LONGER_PART,
            times["rows on a shard"] / longer,
            higher_is_better=False,
        ),
        Figure(f"{name}: copies to the device", copies, "copies/step", 2.0, higher_is_better=False),
        Figure(f"{name}: to the device", there / 1e6, "MB/step", higher_is_better=False),
        Figure(f"{name}: to the host", back / 1e6, "MB/step", higher_is_better=False),
    ]


def _lack_of_fbgemm_on(device: torch.device) -> str:
    """Returns why fbgemm's TBE cannot be measured on a device; "" when it can."""
    return lack_of_fbgemm() if device.type in ("cpu", "cuda") else f"it knows no device of kind {device.type}"


def _busy_ms(run: Callable[[list[OnHost]], float], batches: list[OnHost]) -> float:
    """Returns the milliseconds of a step in which the CUDA device runs kernels and copies, as torch's profiler says."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        run(batches)
    return float(sum(event.self_device_time_total for event in traced.key_averages()) / 1e3 / len(batches))


def _counts(crossings: object) -> tuple[int, int, int]:
    return tuple(getattr(crossings, name) for name in ("to_device", "bytes_to_device", "bytes_to_host"))
