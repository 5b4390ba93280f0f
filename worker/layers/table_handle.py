"""The entry of a distributed layer in a ``state_dict``: the name and the cluster of its table in place of its rows."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...proto.errors import DataLoss, FailedPrecondition

EXTRA_STATE = "_extra_state"  # torch's name of the entry, which follows the layer's path


@dataclass(frozen=True)
class TableHandle:
    """The identity of a table: its name, its width and its cluster.

    Attributes:
        table: the full name, ``namespace/name``.
        dim: the number of columns.
        cluster: the id of the cluster, in hexadecimal digits; "" for a table of an in-process cluster.
        step: the number of the session's next step when the state was taken; -1 where no session has bound the table.
    """

    table: str
    dim: int
    cluster: str
    step: int = -1

    def to_tensor(self) -> Tensor:
        """Returns the handle as JSON in a uint8 tensor of shape (n), so that any format for tensors can store it.

        Its length does not depend on the step, because formats that load in place need the same shape.
        """
        said = asdict(self) | {"step": f"{self.step:020d}"}
        return torch.tensor(list(json.dumps(said, sort_keys=True).encode()), dtype=torch.uint8)

    @staticmethod
    def of_tensor(state: Any, where: str) -> TableHandle:
        """Returns the handle that an entry of a ``state_dict`` holds.

        Args:
            state: the value of the entry.
            where: the key of the entry, for error texts.

        Raises:
            DataLoss: the entry does not hold a handle.
        """
        try:
            if not isinstance(state, Tensor):
                raise TypeError(f"the entry is a {type(state).__name__}")
            said = json.loads(bytes(state.tolist()))
            return TableHandle(str(said["table"]), int(said["dim"]), str(said["cluster"]), int(said["step"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataLoss(f"load_state_dict: {where} is no handle of a table: {error}") from None

    def check(self, saved: TableHandle, clusters: Iterable[str]) -> None:
        """Checks that this table holds the rows of a saved handle.

        Args:
            saved: the handle that was saved.
            clusters: the id of this table's cluster, and those of the clusters whose checkpoints were restored to it.

        Raises:
            FailedPrecondition: the saved table has another name or width, or is of a cluster whose rows are not here.
        """
        # A restore has compared the dims of the rows, and widened them where that was accepted.
        dim = self.dim if _restores_rows.get() else saved.dim
        if (saved.table, dim) != (self.table, self.dim):
            raise FailedPrecondition(
                f"load_state_dict: the layer's table is {self.table} of dim {self.dim}, the state is of {saved.table} "
                f"of dim {saved.dim}"
            )
        if saved.cluster not in clusters:
            raise FailedPrecondition(
                f"load_state_dict: the state is of table {saved.table} on cluster {saved.cluster or 'of a process'}, "
                f"whose rows are not on this one ({self.cluster or 'of a process'}); restore one of its checkpoints"
            )
        if 0 <= saved.step < self.step and not _restores_rows.get():
            _warn_of_newer_rows(self.cluster, saved.step, self.step)


_restores_rows: ContextVar[bool] = ContextVar("restores_rows", default=False)
_warned: set[tuple[str, int, int]] = set()  # clusters and steps of warnings; a model has many tables


@contextmanager
def restoring_rows() -> Iterator[None]:
    """States that are loaded within the block go with rows that were restored with them."""
    token = _restores_rows.set(True)
    try:
        yield
    finally:
        _restores_rows.reset(token)


def _warn_of_newer_rows(cluster: str, saved: int, step: int) -> None:
    if (cluster, saved, step) in _warned:
        return
    _warned.add((cluster, saved, step))
    warnings.warn(
        f"load_state_dict: the state is of before step {saved}, and the rows of its tables have been trained for "
        f"{step - saved} steps since; a tower of then meets rows of now (docs/foreign-models.md, 'Best weights')",
        UserWarning,
        stacklevel=2,
    )


def renamed(state: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    """Returns a copy of a ``state_dict`` in which renamed tables have their new names.

    Args:
        state: the saved ``state_dict``.
        renames: the full names of renamed tables, {saved: present}. The key of an entry changes as well when the
            layer's path equals the table's name.
    """
    changed: dict[str, Any] = {}
    for key, value in state.items():
        path, _, last = key.rpartition(".")
        if last == EXTRA_STATE and isinstance(value, Tensor) and value.dtype is torch.uint8:
            handle = TableHandle.of_tensor(value, key)
            present = renames.get(handle.table, handle.table)
            was, now = (name.partition("/")[2] for name in (handle.table, present))
            path = now if path == was else path
            key, value = f"{path}.{EXTRA_STATE}", replace(handle, table=present).to_tensor()
        changed[key] = value
    return changed
