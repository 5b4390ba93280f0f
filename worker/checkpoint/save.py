"""``save``: all workers of a job together put rows, dense side and readers into a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...proto import control_pb2 as pb
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.urls import absolute as absolute
from ...proto.control import ControlClient, WorkerIdentity
from ...proto.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, SparserowError, error_of, not_allowed
from ..session.session import Session
from .random_state import random_state
from .state_tree import encode_tree

_WAIT_SEC = 5.0  # between two looks at a save that is being written


class Stateful(Protocol):
    """What has a state to be saved: a scheduler, a reader, a prefetched loader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


OneOrMore = Stateful | Sequence[Stateful]


class SavedCheckpoint:
    """A save whose cut is made. Made by :func:`save`.

    Attributes:
        url: the folder that checkpoints are kept in; ``name`` is this one's.
        step: the last one in it; -1: none.
    """

    def __init__(self, control: ControlClient, url: str, name: str, step: int) -> None:
        self._control = control
        self.url, self.name, self.step = url, name, step

    def is_done(self) -> bool:
        """Whether its manifest is written.

        Raises:
            SparserowError: why it failed; older checkpoints are as they were.
        """
        return self._look(0.0)

    def wait(self, deadline_sec: float = 3600.0) -> None:
        """Returns when its manifest is written.

        Raises:
            DeadlineExceeded: it is not, in time; writing goes on.
            SparserowError: why it failed; older checkpoints are as they were.
        """
        deadline = time.monotonic() + deadline_sec
        while not self._look(min(_WAIT_SEC, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"save: {self.url}/{self.name} was not written within {deadline_sec:g} s")

    def _look(self, wait_sec: float) -> bool:
        reply = self._control.get_save(self.url, self.name, wait_sec=wait_sec)
        if reply.phase == pb.FAILED:
            raise error_of(reply.problem_code, f"save: {reply.problem}")
        return bool(reply.phase == pb.SAVED)


def save(
    session: Session,
    url: str,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    scheduler: OneOrMore | None = None,
    reader: Stateful | None = None,
    extra: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    keep: int | None = None,
    full_every: int = 1,
    side_budget: int | None = None,
    wait: bool = True,
    deadline_sec: float = 600.0,
) -> SavedCheckpoint:
    """Saves the job; every worker of it calls this after the same step (whatever step it is in, with bounded or no
    staleness).

    Rows are those of one instant, after exactly the steps that were taken; training goes on while they are written.
    The learning rates of the tables and the state of all random number generators are always in it. A save that fails
    or is killed leaves nothing that looks like a checkpoint, and the next one cleans up.

    Args:
        url: a folder, by path or URL (fsspec), that this worker, the coordinator and all shards can write. Checkpoints
            of one cluster at a time are kept in it; each gets a folder ``save-N`` there.
        model: its dense tensors; rank 0's count, DDP is looked through.
        optimizer: the dense one, ZeRO's included.
        scaler: of the loss.
        scheduler: one or several.
        reader: what has a ``state_dict``: a reader, a ``prefetch``, torchdata's loaders; each worker's own.
        extra: plain values of this worker's own: nested dicts and lists of numbers, strings, tensors.
        config: plain values that ``sparserow checkpoint inspect`` shows.
        keep: afterwards all but the newest so many checkpoints in ``url`` are removed; None: none is.
        full_every: of so many saves one holds all rows, the others those that changed since the one before, which they
            need; 1: each holds all. All rows are saved as well when what changed weighs as much, and after a restore.
        side_budget: bytes of each shard for files that are being written and images of rows that change before they are
            (three quarters of it); None: a tenth of what its rows take. When images have no more room, commits wait.
        wait: until it is written; False: only until the cut is made.
        deadline_sec: for the other workers to come, and for each wait.

    Raises:
        FailedPrecondition: the session has no cluster, is within a step, or the folder cannot be written.
        InvalidArgument: an unknown kind of URL, a reader whose place cannot be saved, or a state that no checkpoint
            can hold.
        ResourceExhausted: a disk is full. The job can go on; older checkpoints are as they were.
        Unavailable: a worker came or went meanwhile; save again.
    """
    control, identity = cluster_of(session, "save")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise not_allowed("save.keep", keep, ">= 1, or None")
    if not isinstance(full_every, int) or full_every < 1:
        raise not_allowed("save.full_every", full_every, ">= 1")
    if side_budget is not None and (not isinstance(side_budget, int) or side_budget < 1):
        raise not_allowed("save.side_budget", side_budget, ">= 1, or None")
    if reader is not None:
        stateful(reader, "save.reader")
    session.flush()
    session.core.native.check_usable()
    if session.core.native.staged_calls:
        raise FailedPrecondition("save: the session is within a step; call it after session.step or session.discard")
    if optimizer is not None and hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)  # of ZeRO: all ranks take part
    url = absolute(url)
    tree = _state(session, model, optimizer, scaler, scheduler, reader, extra)
    name = control.begin_save(url, identity, deadline_sec=deadline_sec)
    request = pb.EnterSaveRequest(
        url=url,
        name=name,
        keep=keep or 0,
        full_every=full_every,
        side_budget_bytes=side_budget or 0,
        config_json="" if config is None else json.dumps(config),
    )
    try:
        file = f"worker.{session.rank}.safetensors"
        encoded = encode_tree(tree, {"sparserow.rank": str(session.rank)})
        (Folder(url) / name).write(file, encoded.pieces)
        request.state.file, request.state.bytes, request.state.xxh3 = file, encoded.size, encoded.xxh3
    except SparserowError as error:
        request.problem = str(error)
        try:
            control.enter_save(request, identity, deadline_sec=deadline_sec)
        except SparserowError:
            raise error from None
        raise
    step = control.enter_save(request, identity, deadline_sec=deadline_sec)
    saved = SavedCheckpoint(control, url, name, step)
    if wait:
        saved.wait(deadline_sec)
    return saved


def keep_rows(session: Session, url: str, *, every_sec: float = 30.0, config: Mapping[str, Any] | None = None) -> None:
    """From now on the cluster saves its rows by itself, as long as the session's job goes on: what a shard that ends
    comes back from, alone, while the others and the workers go on. With bounded or no staleness, where a shard then
    loses at most what was committed to it since the last of these saves.

    A save holds the rows that changed since the one before; one that fails is told in the coordinator's log, and the
    next one is tried in time. Any worker may ask, and several may.

    Args:
        url: a folder of its own, as ``url`` of :func:`save`.
        every_sec: from the beginning of a save to that of the next; (0, 86400].
        config: as of :func:`save`; the saves repeat that of the worker that asked last.

    Raises:
        FailedPrecondition: the session has no cluster, or is synchronous: then all go back together.
        InvalidArgument: an unknown kind of URL, or ``every_sec`` out of range.
        ResourceExhausted: the job has its rows saved in 16 other folders.
    """
    control, identity = cluster_of(session, "keep_rows")
    if session.core.placement.staleness == 0:
        raise FailedPrecondition("keep_rows: the session has staleness 0, where all go back together; call save")
    config_json = "" if config is None else json.dumps(config)
    control.keep_rows(absolute(url), identity, every_sec=every_sec, config_json=config_json)


def _state(
    session: Session,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    scaler: GradScaler | None,
    scheduler: OneOrMore | None,
    reader: Stateful | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "step": session.current_step,
        "random": random_state(),
        "rates": session.core.learning_rates(),
    }
    is_first = session.rank == 0
    if model is not None and is_first:
        tree["model"] = dict(bare(model).state_dict())
    if optimizer is not None and is_first:
        tree["optimizer"] = optimizer.state_dict()
    if scaler is not None:
        tree["scaler"] = scaler.state_dict()
    if scheduler is not None:
        tree["schedulers"] = [each.state_dict() for each in several(scheduler)]
    if reader is not None:
        tree["reader"] = stateful(reader, "save.reader").state_dict()
    if extra is not None:
        tree["extra"] = dict(extra)
    return tree


def stateful(reader: Any, where: str) -> Stateful:
    """The reader, whose place can be saved.

    Raises:
        InvalidArgument: it cannot.
    """
    if not (hasattr(reader, "state_dict") and hasattr(reader, "load_state_dict")):
        raise InvalidArgument(
            f"{where}: {type(reader).__name__} has no state_dict and load_state_dict, so its place cannot be saved; "
            "allowed: torchdata's StatefulDataLoader, sr.prefetch of one, or None"
        )
    checked: Stateful = reader
    return checked


def cluster_of(session: Session, what: str) -> tuple[ControlClient, WorkerIdentity]:
    """The coordinator of a session and the session's identity there.

    Raises:
        FailedPrecondition: its shards are in this process.
    """
    if session.core.identity is None or not isinstance(session.core.catalog, ControlClient):
        raise FailedPrecondition(f"{what}: the session's shards are in this process; it needs a cluster (connect)")
    return session.core.catalog, session.core.identity


def bare(model: nn.Module) -> nn.Module:
    """The module within DDP."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


def several(scheduler: OneOrMore) -> Sequence[Stateful]:
    """A sequence of one or more."""
    return scheduler if isinstance(scheduler, Sequence) else [scheduler]
