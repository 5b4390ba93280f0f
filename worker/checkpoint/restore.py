"""``restore``: sets all workers of a job, and all shards, back to a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...cpp_ext.torch_arrays import tensor_of
from ...proto import control_pb2 as pb
from ...proto.checkpoint import manifest as files
from ...proto.checkpoint.accepted import check_accepted
from ...proto.checkpoint.dense_files import TREE
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.state_tree import decode_tree
from ...proto.errors import FailedPrecondition, SparserowError, not_allowed
from ..layers.table_handle import restoring_rows
from ..session.session import JobSession
from ..session.tensor_group import on_leader
from .device_parts import Wanted, read_parts
from .every_rank import is_in_parts, on_every_rank, part_again
from .random_state import set_random_state
from .restored_dense import RestoredDense
from .restored_states import RestoredStates, check_count, no_state
from .save import OneOrMore, SharedReader, Stateful, absolute, cluster_of, several


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The result of a restore.

    Attributes:
        name: the name of the checkpoint.
        step: the last step in the checkpoint; -1 when it has no step. The session goes on with the step after it, or
            after the session's own last step when that is later.
        rows: the number of rows in all tables, on all shards.
        extra: the values that this worker gave to ``save`` as ``extra``. A rank that the checkpoint lacks gets those of
            rank 0. {} when none were given.
        extras: the values of all workers, in rank order, when the reader went on from the states of all; else ().
        config: the values that ``save`` was given as ``config``.
        anew: the names of tensors of the model that the checkpoint lacks or has in another shape; () with ``strict``.
    """

    name: str
    step: int
    rows: int
    extra: dict[str, Any]
    config: dict[str, Any]
    extras: tuple[dict[str, Any], ...] = ()
    anew: tuple[str, ...] = ()


def restore(
    session: JobSession,
    url: str,
    *,
    name: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    scheduler: OneOrMore | None = None,
    reader: Stateful | None = None,
    renames: Mapping[str, str] | None = None,
    tables: Sequence[str] | None = None,
    accept: Sequence[str] = (),
    strict: bool = True,
    other_data: bool = False,
    deadline_sec: float = 3600.0,
) -> RestoredCheckpoint:
    """Sets the session's namespace and this worker back to a checkpoint.

    Every worker of the job calls it, and no other job of the namespace may run. Other namespaces go on, unless the
    cluster or one of its shards has no rows: then every namespace is restored, and no job of any may run. The number of
    shards or workers that wrote the checkpoint does not matter. Weights, optimizer state and update counts of rows come
    back bit for bit, and so do versions where nothing else is on the shards; beside rows of other tables, rows get new
    versions. Tables of the session's namespace that the checkpoint does not have are empty afterwards. Each worker's
    reader and random numbers come back if the worker's rank was there when the checkpoint was saved; otherwise its
    random numbers stay as they are. The readers of job files go on with any number of workers: they get the states of
    all. With a row cache, call it before the first step of the session.

    Args:
        url: the URL that ``save`` was given.
        name: the name of the checkpoint; None: the newest.
        model: the model to load, compiled or not, whatever the saved one was; None: no model is loaded.
        optimizer: the dense optimizer to load; None: none is loaded.
        scaler: the scaler of the loss to load; None: none is loaded.
        scheduler: one scheduler or several to load, in the order that ``save`` was given; None: none are loaded.
        reader: the reader to load; None: none is loaded.
        renames: tables that have another name now, {name in the checkpoint: present name}. A name is within the
            session's namespace, or NAMESPACE/NAME. The rows of a renamed table get new versions.
        tables: the tables to restore, by their names in the checkpoint, within the namespace unless ``renames`` names
            one there; all other tables stay as they are (a warm
            start). None: all tables.
        accept: what may differ of a table since the save, as ``TABLE.KEY``, with ``*`` for every table: "dim" (a wider
            one; new columns are initial and the optimizer's state begins anew), "dtype" (weights are rounded to it) or
            "optimizer" (its state begins anew). What is not here is refused.
        strict: whether ``model`` must have the tensors of the checkpoint. False: those whose name and shape are the
            same are loaded with their state in ``optimizer``; the others of ``model`` stay as they are, as
            :attr:`RestoredCheckpoint.anew` says. Whether a tensor of the same shape means the same is for the caller to
            know: a layer that reads other inputs in their place has the same shape as well.
        other_data: whether the data that the coordinator leases to the job are others than those of the checkpoint, and
            are read from their beginning.
        deadline_sec: the deadline of the whole restore, in seconds.

    Returns:
        The name, step and contents of the restored checkpoint.

    Raises:
        InvalidArgument: ``accept`` has what is no change, or a table that is not restored.
        NotFound: there is no such checkpoint, or it lacks a state that was asked for, and nothing is changed.
        FailedPrecondition: the names or shapes of the checkpoint's model are not those of ``model``, or its parameter
            groups are not those of ``optimizer``, and nothing is changed; another job of the namespace runs; the slot
            count, or a table's dim, dtype or optimizer, differs and is not in ``accept``; or the session is within a
            step.
        DataLoss: a file is missing or damaged; the text names it.
    """
    group = session.core.tensor_group
    if session.core.leads:
        cluster_of(session, "restore")
    session.core.restores_begun += 1  # first of all, so that ranks count alike whatever is wrong on one of them
    session.flush()
    session.core.native.check_usable()
    if session.core.native.staged_calls:
        raise FailedPrecondition("restore: the session is within a step; call session.discard first")
    if session.core.placement.cache is not None and session.stats().steps_committed:
        raise FailedPrecondition("restore: the session has a row cache; restore before its first step")
    session.discard()
    url = absolute(url)
    part_again(model)
    check_accepted(accept, "restore.accept")
    accepted = [each if each.startswith("*.") else _full(session, each) for each in accept]
    full = {_full(session, saved): _full(session, present) for saved, present in (renames or {}).items()}
    request = pb.RestoreRequest(
        url=url,
        name=name or "",
        namespace=session.namespace,
        renames=[pb.TableRename(saved=saved, name=present) for saved, present in full.items()],
        tables=[_full(session, table) for table in tables or ()],
        accept=accepted,
        next_step=session.current_step,
        other_data=other_data,
    )

    states, unread = _States.found(Folder(url), name)
    asked = RestoredStates(optimizer, scaler, scheduler, reader)
    if unread is None:
        RestoredDense(states.folder, model, optimizer, full, strict=strict).check(states, asked, session.rank)
    wanted = Wanted(f"{url}/{states.name}", full, tuple(request.tables), accepted)
    on_devices = read_parts(session, states.ranks, states.of_rank, wanted, unread)
    _leave_to_servers(request, on_devices.names)

    def ask() -> _Reply:
        control, identity = cluster_of(session, "restore")
        reply = control.restore(request, identity, attempt=session.core.restores_begun, deadline_sec=deadline_sec)
        return _Reply(reply.name, reply.step, reply.rows, reply.next_step)

    def ask_in_group() -> _Reply:
        return on_leader(group, ask)

    reply = on_every_rank(ask_in_group) if is_in_parts(model) else ask_in_group()
    on_devices.set()
    manifest = files.read_manifest(Folder(url), reply.name)
    if states.name != manifest.name:
        states = _States(Folder(url) / manifest.name, manifest)
    mine, first = states.of_rank(session.rank), states.of_rank(0)
    where = f"{url}/{manifest.name}"
    session.core.origins.append(f"{manifest.cluster_id:016x}")
    dense = RestoredDense(Folder(url) / manifest.name, model, optimizer, full, strict=strict)
    has_model = model is not None
    if first is not None and TREE in first:
        with restoring_rows():
            dense.load_parts(first[TREE])
        model = optimizer = None
    loaders: tuple[tuple[str, Any, dict[str, Any] | None, Callable[[Any], None]], ...] = (
        ("model", model, first, dense.load_model),
        ("optimizer", optimizer, first, lambda _: dense.load_optimizer(first or {})),
        ("scaler", scaler, mine or first, lambda state: scaler.load_state_dict(state)),  # type: ignore[union-attr]
        ("schedulers", scheduler, mine or first, lambda state: _load_several(scheduler, state, where)),
    )
    for what, target, tree, loads in loaders:
        if target is None:
            continue
        if tree is None or what not in tree:
            raise no_state(where, what, session.rank)
        with restoring_rows():
            loads(tree[what])
    session.core.accept_restored_dense(has_model=has_model)
    everyone = _load_reader(reader, states, session.rank, where)
    session.core.set_learning_rates((mine or first or {}).get("rates", {}))
    if mine is not None:
        set_random_state(mine["random"])
    session.core.native.skip_to(reply.next_step)
    if not tables:
        session.core.on_device.steps_undone = max(0, reply.next_step - (reply.step + 1))
    extra = (mine or first or {}).get("extra", {})
    extras = tuple(tree.get("extra", {}) for tree in everyone)
    anew = tuple(dense.anew)
    return RestoredCheckpoint(manifest.name, reply.step, reply.rows, extra, manifest.config, extras, anew)


def check_reader(reader: Stateful, folder: Folder, manifest: files.Manifest, rank: int) -> None:
    """Checks, without a change, that a reader can go on from a checkpoint.

    Args:
        reader: the reader of this worker.
        folder: the folder of the checkpoints.
        manifest: the manifest of the checkpoint.
        rank: the rank of this worker.

    Raises:
        Exception: the reader refuses the states.
    """
    if isinstance(reader, SharedReader):
        states = _States(folder / manifest.name, manifest)
        if not reader.goes_on_from((states.of_rank(rank) or {}).get("reader")):
            reader.check_state_dicts([tree["reader"] for tree in states.all() if "reader" in tree])


def _load_reader(reader: Stateful | None, states: _States, rank: int, where: str) -> Sequence[dict[str, Any]]:
    """Loads the reader; returns the trees of all workers when it needed the states of all, else ()."""
    if reader is None:
        return ()
    state = (states.of_rank(rank) or {}).get("reader")
    if isinstance(reader, SharedReader) and not reader.goes_on_from(state):
        trees = [tree for tree in states.all() if "reader" in tree]
        reader.load_state_dicts([tree["reader"] for tree in trees])
        return trees
    if state is None:
        raise no_state(where, "reader", rank)
    reader.load_state_dict(state)
    return ()


def _leave_to_servers(request: pb.RestoreRequest, on_devices: Sequence[str]) -> None:
    """Takes the tables on devices, by their full names in the checkpoint, out of what the coordinator is asked for."""
    tables = [table for table in request.tables if table not in on_devices]
    if request.tables and not tables:
        raise not_allowed(
            "restore.tables", list(request.tables), "at least one table on the servers beside those on devices"
        )
    renames = [rename for rename in request.renames if rename.saved not in on_devices]
    names = {rename.saved: rename.name for rename in request.renames}
    elsewhere = {names.get(name, name) for name in on_devices}
    accept = [each for each in request.accept if each.rpartition(".")[0] not in elsewhere]
    del request.tables[:], request.renames[:], request.accept[:]
    request.tables.extend(tables)
    request.renames.extend(renames)
    request.accept.extend(accept)


def _load_several(scheduler: OneOrMore | None, states: list[Any], where: str) -> None:
    assert scheduler is not None
    check_count(scheduler, states, where)
    for each, state in zip(several(scheduler), states, strict=True):
        each.load_state_dict(state)


@dataclass(frozen=True)
class _Reply:
    """The coordinator's reply, in a form that a leader can send to its tensor group."""

    name: str
    step: int
    rows: int
    next_step: int


class _States:
    """The states of the workers in a checkpoint; each file is read when it is first asked for."""

    def __init__(self, folder: Folder, manifest: files.Manifest | None) -> None:
        self.folder = folder
        self._entries = {} if manifest is None else {entry.rank: entry for entry in manifest.workers}
        self._read: dict[int, dict[str, Any]] = {}
        self.name = "" if manifest is None else manifest.name

    @staticmethod
    def found(root: Folder, name: str | None) -> tuple[_States, SparserowError | None]:
        """Returns the states of a checkpoint, or none and the error when it cannot be read.

        Args:
            root: the folder of checkpoints.
            name: the name of the checkpoint; None: the newest.
        """
        try:
            manifest = files.read_manifest(root, name)
        except SparserowError as error:
            return _States(root, None), error
        return _States(root / manifest.name, manifest), None

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a state, ascending."""
        return sorted(self._entries)

    def all(self) -> list[dict[str, Any]]:
        """Returns the state trees of all ranks, in their order."""
        trees = [self.of_rank(rank) for rank in sorted(self._entries)]
        return [tree for tree in trees if tree is not None]

    def of_rank(self, rank: int) -> dict[str, Any] | None:
        """Returns the state tree of a rank; None when the checkpoint has none for it."""
        entry = self._entries.get(rank)
        if entry is None:
            return None
        if rank not in self._read:
            data = files.check_file(self.folder, entry)
            self._read[rank] = decode_tree(data, f"{self.folder.url}/{entry.file}", tensor_of)
        return self._read[rank]


def _full(session: JobSession, table: str) -> str:
    return table if "/" in table else f"{session.namespace}/{table}"
