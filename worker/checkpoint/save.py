"""``save``: all workers of a job together write rows, dense side and readers into a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...proto import control_pb2 as pb
from ...proto.checkpoint.dense_files import TREE
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.urls import absolute as absolute
from ...proto.control import ControlClient
from ...proto.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SparserowError,
    error_of,
    not_allowed,
)
from ...proto.worker_identity import WorkerIdentity
from ..session.compiled_module import bare
from ..session.session import JobSession
from ..session.tensor_group import on_leader
from .dense_state import parameter_names, state_of
from .device_parts import TREE_KEY, parts_of
from .every_rank import is_in_parts, on_every_rank, part_again
from .random_state import random_state
from .state_tree import encode_tree

_WAIT_SEC = 5.0  # how long one request to the coordinator waits for a save to be written


class Stateful(Protocol):
    """An object whose state can be saved, such as a scheduler, a reader or a prefetched loader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class SharedReader(Protocol):
    """A reader whose workers know the positions of each other, so that any number of them can go on."""

    def goes_on_from(self, state: dict[str, Any] | None, /) -> bool: ...
    def check_state_dicts(self, states: Sequence[dict[str, Any]], /) -> None: ...
    def load_state_dicts(self, states: Sequence[dict[str, Any]], /) -> None: ...


OneOrMore = Stateful | Sequence[Stateful]


class SavedCheckpoint:
    """A checkpoint whose cut is made and whose files may still be being written. :func:`save` makes it.

    On a follower of a tensor group the answers say nothing about the files, as its leader knows about them.

    Attributes:
        url: the URL of the folder of checkpoints.
        name: the name of this checkpoint, which is its folder in ``url``.
        step: the last step in the checkpoint; -1 when it has no step.
    """

    def __init__(self, control: ControlClient | None, url: str, name: str, step: int) -> None:
        self._control = control
        self.url, self.name, self.step = url, name, step

    def is_done(self) -> bool:
        """Returns whether the checkpoint's manifest is written.

        Raises:
            SparserowError: the save has failed; older checkpoints are unchanged.
        """
        return self._look(0.0)

    def wait(self, deadline_sec: float = 3600.0) -> None:
        """Waits until the checkpoint's manifest is written.

        Args:
            deadline_sec: how long to wait, in seconds.

        Raises:
            DeadlineExceeded: the manifest was not written in time; writing goes on.
            SparserowError: the save has failed; older checkpoints are unchanged.
        """
        deadline = time.monotonic() + deadline_sec
        while not self._look(min(_WAIT_SEC, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"save: {self.url}/{self.name} was not written within {deadline_sec:g} s")

    def _look(self, wait_sec: float) -> bool:
        if self._control is None:
            return True
        reply = self._control.get_save(self.url, self.name, wait_sec=wait_sec)
        if reply.phase == pb.FAILED:
            raise error_of(reply.problem_code, f"save: {reply.problem}")
        return bool(reply.phase == pb.SAVED)


def save(
    session: JobSession,
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
    """Saves the job in a checkpoint.

    Every worker of the job calls it. At staleness 0 all workers call it after the same step; otherwise each calls it
    in whatever step it is. Rows are those of one instant, after exactly the steps that were taken; training goes on
    while they are written. The learning rates of the tables and the states of all random number generators are always
    included. A save that fails or is killed leaves nothing that looks like a checkpoint, and the next save cleans up.

    Args:
        url: a folder, by path or URL (fsspec), that this worker, the coordinator and all shards can write. It holds the
            checkpoints of one cluster at a time, each in a folder ``save-N``.
        model: the model whose dense tensors are saved, with or without DDP; those of rank 0 are used. Of a model that
            ranks have in parts (FSDP2, tensor parallelism), each rank saves its parts. None: no model.
        optimizer: the dense optimizer; ZeRO's is allowed. None: no optimizer.
        scaler: the scaler of the loss; None: no scaler.
        scheduler: one scheduler or several; None: no scheduler.
        reader: this worker's reader, with a ``state_dict``: a reader, a ``prefetch``, or a loader of torchdata. None:
            no reader.
        extra: plain values of this worker: nested dicts and lists of numbers, strings and tensors. None: no values.
        config: plain values that ``sparserow checkpoint inspect`` shows. None: no values.
        keep: the number of newest checkpoints in ``url`` that are kept afterwards; older ones are removed. None: none
            is removed.
        full_every: one of this many saves holds all rows. The other saves hold the rows that changed since the save
            before, and need that one. 1: every save holds all rows. All rows are also saved after a restore, and when
            the changed rows would take as many bytes.
        side_budget: the memory of each shard for the save, in bytes: for files that are being written and, up to three
            quarters, for images of rows that change before they are written. When there is no more room for images,
            commits wait. None: a tenth of the memory of the shard's rows.
        wait: whether to wait until the checkpoint is written; False: only until the cut is made.
        deadline_sec: how long to wait for the other workers, and for each later phase, in seconds.

    Returns:
        The checkpoint, by which the caller can wait when ``wait`` is False.

    Raises:
        FailedPrecondition: the session has no cluster or is within a step, or the folder cannot be written.
        InvalidArgument: the URL's kind is unknown, the reader's position cannot be saved, or a checkpoint cannot hold
            a value of the state.
        ResourceExhausted: a disk is full. The job can go on; older checkpoints are unchanged.
        Unavailable: a worker joined or left meanwhile; save again.
    """
    _control_of(session)
    session.core.saves_begun += 1  # first of all, so that ranks count alike whatever is wrong on one of them
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise not_allowed("save.keep", keep, ">= 1, or None")
    if not isinstance(full_every, int) or full_every < 1:
        raise not_allowed("save.full_every", full_every, ">= 1")
    if side_budget is not None and (not isinstance(side_budget, int) or side_budget < 1):
        raise not_allowed("save.side_budget", side_budget, ">= 1, or None")
    if reader is not None:
        stateful(reader, "save.reader")
    session.flush()
    session.core.write_dense_buffers()
    session.core.native.check_usable()
    if session.core.native.staged_calls:
        raise FailedPrecondition("save: the session is within a step; call it after session.step or session.discard")
    if optimizer is not None and hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)  # with ZeRO, all ranks take part
    url = absolute(url)
    part_again(model)
    has_parts = is_in_parts(model)
    name = _begun(session, url, deadline_sec, has_parts=has_parts)
    parts: dict[str, Any] | None = None
    problem: SparserowError | None = None
    if has_parts:
        from .dense_parts import save_parts  # slow to import

        assert model is not None
        try:
            parts = save_parts(Folder(url) / name, bare(model), optimizer)
        except SparserowError as error:
            problem = error
    tree = _state(session, model, optimizer, scaler, scheduler, reader, extra, parts=parts)
    request = pb.EnterSaveRequest(
        url=url,
        name=name,
        keep=keep or 0,
        full_every=full_every,
        side_budget_bytes=side_budget or 0,
        config_json="" if config is None else json.dumps(config),
    )
    step = on_leader(
        session.core.tensor_group, lambda: _entered(session, request, tree, problem, deadline_sec=deadline_sec)
    )
    saved = SavedCheckpoint(_control_of(session), url, name, step)
    if wait:
        on_leader(session.core.tensor_group, lambda: saved.wait(deadline_sec))
    return saved


def _control_of(session: JobSession) -> ControlClient | None:
    """Returns the client of the coordinator; None on a follower of a tensor group."""
    return cluster_of(session, "save")[0] if session.core.leads else None


def _begun(session: JobSession, url: str, deadline_sec: float, *, has_parts: bool) -> str:
    """Begins the save on the workers; returns the name of the checkpoint on every rank."""

    def begin() -> str:
        control, identity = cluster_of(session, "save")
        attempt = session.core.saves_begun
        reply = control.begin_save(url, identity, attempt=attempt, deadline_sec=deadline_sec)
        session.core.saves_begun = max(reply.attempts, attempt)
        if not reply.name:
            raise error_of(reply.problem_code, f"save: {reply.problem}")
        return str(reply.name)

    def begin_in_group() -> str:
        return on_leader(session.core.tensor_group, begin)

    return on_every_rank(begin_in_group) if has_parts else begin_in_group()


def _entered(
    session: JobSession,
    request: pb.EnterSaveRequest,
    tree: dict[str, Any],
    problem: SparserowError | None,
    *,
    deadline_sec: float,
) -> int:
    """Writes this worker's state and enters the save, or reports to the coordinator why it cannot.

    Fills in the state of ``request``; ``problem`` is an error of before. Waits for the other workers, and returns the
    last step in the cut.
    """
    control, identity = cluster_of(session, "save")
    try:
        if problem is not None:
            raise problem
        file = f"worker.{session.rank}.safetensors"
        encoded = encode_tree(tree, {"sparserow.rank": str(session.rank)})
        request.state.file, request.state.bytes = file, encoded.size
        request.state.xxh3 = (Folder(request.url) / request.name).write(file, encoded.pieces)
    except SparserowError as error:
        request.problem = str(error)
        try:
            control.enter_save(request, identity, deadline_sec=deadline_sec)
        except SparserowError as refusal:
            # The folder goes with a save that has failed; the reason is why it failed.
            went_with_it = isinstance(error, NotFound) and str(error) not in str(refusal)
            raise (refusal if went_with_it else error) from None
        raise
    return control.enter_save(request, identity, deadline_sec=deadline_sec)


def keep_rows(
    session: JobSession, url: str, *, every_sec: float = 30.0, config: Mapping[str, Any] | None = None
) -> None:
    """Makes the cluster save its rows periodically from now on, as long as the session's job goes on.

    A shard that ends is restored from these saves alone, while the other shards and the workers go on. It loses at most
    the commits since the last of these saves. The session must have bounded or no staleness. A save holds the rows that
    changed since the save before. The coordinator logs a save that fails, and tries the next one in time. Any number of
    workers may call it.

    Args:
        url: a folder for these saves only, by path or URL, which the coordinator and all shards can write.
        every_sec: the time from the beginning of one save to that of the next, in seconds; (0, 86400].
        config: plain values that ``sparserow checkpoint inspect`` shows. The saves have the values of the worker that
            called last. None: no values.

    Raises:
        FailedPrecondition: the session has no cluster, or has staleness 0, where all shards are restored together.
        InvalidArgument: the URL's kind is unknown, or ``every_sec`` is out of range.
        ResourceExhausted: the job's rows are already saved in 16 other folders.
    """
    control, identity = cluster_of(session, "keep_rows")
    if session.core.placement.staleness == 0:
        raise FailedPrecondition(
            "keep_rows: the session has staleness 0, where all shards are restored together; call save"
        )
    config_json = "" if config is None else json.dumps(config)
    control.keep_rows(absolute(url), identity, every_sec=every_sec, config_json=config_json)


def _state(
    session: JobSession,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    scaler: GradScaler | None,
    scheduler: OneOrMore | None,
    reader: Stateful | None,
    extra: Mapping[str, Any] | None,
    *,
    parts: dict[str, Any] | None,
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "step": session.current_step,
        "random": random_state(),
        "rates": session.core.learning_rates(),
    }
    on_devices = parts_of(session)
    if on_devices is not None:
        tree[TREE_KEY] = on_devices
    is_first = session.rank == 0
    if parts is not None and is_first:
        tree[TREE] = parts
    if model is not None and is_first and parts is None:
        tree["model"] = state_of(model)
    if optimizer is not None and is_first and parts is None:
        tree["optimizer"] = optimizer.state_dict()
        tree["parameters"] = [] if model is None else parameter_names(model, optimizer)
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
    """Returns ``reader`` if its position can be saved.

    Args:
        reader: the reader.
        where: the argument's name in error texts.

    Raises:
        InvalidArgument: the reader has no ``state_dict`` and ``load_state_dict``.
    """
    if not (hasattr(reader, "state_dict") and hasattr(reader, "load_state_dict")):
        raise InvalidArgument(
            f"{where}: {type(reader).__name__} has no state_dict and load_state_dict, so its position cannot be saved; "
            "allowed: torchdata's StatefulDataLoader, session.prefetch of one, or None"
        )
    checked: Stateful = reader
    return checked


def cluster_of(session: JobSession, what: str) -> tuple[ControlClient, WorkerIdentity]:
    """Returns the client of a session's coordinator, and the worker's identity there.

    Args:
        session: the session.
        what: the name of the calling function, for error texts.

    Raises:
        FailedPrecondition: the session's shards are in this process.
    """
    if session.core.identity is None or not isinstance(session.core.catalog, ControlClient):
        raise FailedPrecondition(f"{what}: the session's shards are in this process; it needs a cluster (connect)")
    return session.core.catalog, session.core.identity


def several(scheduler: OneOrMore) -> Sequence[Stateful]:
    """Returns the schedulers as a sequence."""
    return scheduler if isinstance(scheduler, Sequence) else [scheduler]
