"""Tables on devices in a checkpoint: each rank's rows are a part of that rank's state, in the same cut as the rest.

    worker.R.safetensors    tree "device_tables": {full name: what the rows are of, weights, state, update counts}

Any number of ranks reads the parts of any number of ranks: a rank takes the keys that it has now from all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...proto.checkpoint.accepted import is_accepted
from ...proto.errors import DataLoss, FailedPrecondition, SparserowError
from ...proto.native import optimizer_parameters
from ...proto.optim import OPTIMIZERS, RowOptimizer
from ..device_tables.device_tables import DeviceTables
from ..device_tables.rank_rows import RankRows
from ..device_tables.share import Share
from ..session.session import JobSession

TREE_KEY = "device_tables"
Part = Mapping[str, Any]


def parts_of(session: JobSession) -> dict[str, Part] | None:
    """Returns this rank's part of each table on devices, by full name; None when the session has none."""
    tables = _tables_of(session)
    if tables is None:
        return None
    return {tables.table(name).schema.full_name: _part_of(tables.table(name)) for name in tables.names}


def _tables_of(session: JobSession) -> DeviceTables | None:
    tables = session.core.device_tables
    return tables if isinstance(tables, DeviceTables) and tables.names else None


def _part_of(rows: RankRows) -> Part:
    return {
        "table_id": rows.share.table_id,
        "num_rows": rows.share.num_rows,
        "ranks": rows.share.world,
        "dim": rows.schema.dim,
        "optimizer": _facts_of(rows.schema.optimizer),
        "weights": _on_host(rows.weights),
        "state": _on_host(rows.state),
        "update_counts": _on_host(rows.update_counts),
    }


def _on_host(part: Tensor) -> Tensor:
    """Returns a part of a matrix with memory of its own, because torch saves a view with all of the matrix."""
    return part.clone() if part.device.type == "cpu" else part.cpu()


def _facts_of(optimizer: RowOptimizer) -> dict[str, Any]:
    """Returns the kind of an optimizer and its options, without the learning rate."""
    kind, options = optimizer_parameters(optimizer)
    return {"kind": kind, **options}


def saved_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of a saved optimizer; an option that its program did not know has its default."""
    kind = OPTIMIZERS.get(facts["kind"])
    return facts if kind is None else {**_facts_of(kind()), **facts}


@dataclass(frozen=True)
class _NewRows:
    """The rows of one table as this rank will have them."""

    table: RankRows
    weights: Tensor
    state: Tensor
    update_counts: Tensor


class DeviceParts:
    """The rows of a session's tables on devices, read from a checkpoint and not yet set.

    Args:
        names: the full names of these tables in the checkpoint.
        rows: their new rows.
    """

    def __init__(self, names: Sequence[str] = (), rows: Sequence[_NewRows] = ()) -> None:
        self.names, self._rows = names, rows

    def set(self) -> None:
        """Sets the rows."""
        for new in self._rows:
            new.table.weights.copy_(new.weights)
            new.table.state.copy_(new.state)
            new.table.update_counts.copy_(new.update_counts)


@dataclass(frozen=True)
class Wanted:
    """What a restore asks for.

    Attributes:
        where: the URL of the checkpoint, for error texts.
        renames: {full name of a table in the checkpoint: present full name}.
        tables: full names in the checkpoint of the tables to restore; empty: all of them.
        accept: what may differ of a table, as NAMESPACE/NAME.KEY or *.KEY; here optimizers alone.
    """

    where: str
    renames: Mapping[str, str]
    tables: Sequence[str]
    accept: Sequence[str]


def read_parts(
    session: JobSession,
    ranks: Sequence[int],
    state_of: Callable[[int], dict[str, Any] | None],
    wanted: Wanted,
    unread: SparserowError | None,
) -> DeviceParts:
    """Reads this rank's rows of all tables on devices. Every rank calls it; nothing is changed.

    Args:
        session: the session.
        ranks: the ranks of the checkpoint.
        state_of: returns the state of a rank in the checkpoint.
        wanted: what to restore.
        unread: the error with which the checkpoint could not be read; None: it was read.

    Raises:
        FailedPrecondition: the checkpoint has a table that this session does not have on devices, or the other way
            round; or the rows, columns or optimizer of a table differ. Or a rank has failed.
        DataLoss: a part is missing or damaged.
    """
    tables = _tables_of(session)
    if tables is None and unread is not None:
        return DeviceParts()  # the coordinator says why
    problem, found = unread, DeviceParts()
    try:
        if problem is None:
            found = _read(tables, ranks, state_of, wanted)
    except SparserowError as error:
        problem = error
    if tables is not None:
        tables.exchanges.check_all(problem)
    elif problem is not None:
        raise problem
    return found


def _read(
    tables: DeviceTables | None,
    ranks: Sequence[int],
    state_of: Callable[[int], dict[str, Any] | None],
    wanted: Wanted,
) -> DeviceParts:
    first = (state_of(ranks[0]) or {}) if ranks else {}
    saved = [name for name in first.get(TREE_KEY, {}) if not wanted.tables or name in wanted.tables]
    mine = {} if tables is None else {tables.table(name).schema.full_name: tables.table(name) for name in tables.names}
    rows = []
    for name in saved:
        present = wanted.renames.get(name, name)
        if present not in mine:
            raise FailedPrecondition(
                f"restore: {wanted.where} has table {name} on the devices of ranks, and this session has not; call "
                "distribute with tables={...: sr.Table(placement='device')} before restore, or name other tables in "
                "restore.tables"
            )
        parts = [_checked_part((state_of(rank) or {}).get(TREE_KEY, {}), name, rank, wanted.where) for rank in ranks]
        rows.append(_new_rows(mine[present], name, parts, wanted))
    restored = {new.table.schema.full_name for new in rows}
    missing = [name for name in mine if name not in restored]
    if missing and not wanted.tables:
        raise FailedPrecondition(
            f"restore: {wanted.where} has no table {missing[0]} on the devices of ranks; give the table the placement "
            "that it had, or name the tables to restore in restore.tables"
        )
    return DeviceParts(saved, rows)


def _checked_part(parts: Mapping[str, Part], name: str, rank: int, where: str) -> Part:
    if name not in parts:
        raise DataLoss(f"restore: {where} has no part of table {name} of rank {rank}; restore another checkpoint")
    part = parts[name]
    share = _share_of(part)
    if part["weights"].shape != (share.size(rank), part["dim"]):
        raise DataLoss(f"restore: {where}: the part of table {name} of rank {rank} has another number of rows")
    return part


def _share_of(part: Part) -> Share:
    return Share(int(part["table_id"]), int(part["num_rows"]), int(part["ranks"]))


def _new_rows(table: RankRows, name: str, parts: Sequence[Part], wanted: Wanted) -> _NewRows:
    saved = {**parts[0], "optimizer": saved_facts(parts[0]["optimizer"])}
    facts = {
        "num_rows": table.share.num_rows,
        "dim": table.schema.dim,
        "optimizer": _facts_of(table.schema.optimizer),
    }
    keeps_state = True
    for what, value in facts.items():
        if saved[what] == value:
            continue
        if what == "optimizer" and is_accepted(wanted.accept, table.schema.full_name, what):
            keeps_state = False
            continue
        raise FailedPrecondition(
            f"restore: table {name} of {wanted.where} has {what} {saved[what]}, and this session's has {value}"
            + (
                f"; its state begins anew where {table.schema.full_name}.optimizer is in accept"
                if what == "optimizer"
                else ""
            )
        )
    weights, state = torch.empty(table.weights.shape), table.state.cpu().clone()
    counts = torch.zeros(table.update_counts.shape, dtype=torch.int32)
    for rank, part in enumerate(parts):
        keys = _share_of(part).keys_of(rank)
        is_mine = table.share.owners(keys) == table.rank
        rows = table.share.rows(keys[is_mine])
        weights[rows] = part["weights"][is_mine]
        if keeps_state:
            state[rows] = part["state"][is_mine]
            counts[rows] = part["update_counts"][is_mine]
    if not keeps_state:
        state = table.fresh_state(weights)
    return _NewRows(table, weights, state, counts)
