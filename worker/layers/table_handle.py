"""What a distributed layer has in a ``state_dict`` in place of its rows: its table's name, and where that lives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...proto.errors import DataLoss, FailedPrecondition

EXTRA_STATE = "_extra_state"  # torch's, behind the layer's path


@dataclass(frozen=True)
class TableHandle:
    """A table of a cluster.

    Attributes:
        table: ``namespace/name``.
        dim: columns.
        cluster: id of the cluster, in hexadecimal digits; empty: in the process itself.
    """

    table: str
    dim: int
    cluster: str

    def to_tensor(self) -> Tensor:
        """(n) uint8: JSON, so that whatever keeps tensors keeps it."""
        return torch.tensor(list(json.dumps(asdict(self), sort_keys=True).encode()), dtype=torch.uint8)

    @staticmethod
    def of_tensor(state: Any, where: str) -> TableHandle:
        """The handle of a ``state_dict``'s entry.

        Raises:
            DataLoss: it is none.
        """
        try:
            if not isinstance(state, Tensor):
                raise TypeError(f"it is a {type(state).__name__}")
            said = json.loads(bytes(state.tolist()))
            return TableHandle(str(said["table"]), int(said["dim"]), str(said["cluster"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataLoss(f"load_state_dict: {where}: is no handle of a table: {error}") from None

    def check(self, saved: TableHandle, clusters: Iterable[str]) -> None:
        """Compares with what was saved, whose rows this table must hold.

        Args:
            clusters: ids of this table's cluster, and of those whose checkpoints were restored to it.

        Raises:
            FailedPrecondition: it is another table, of other columns, or of a cluster whose rows are not here.
        """
        if (saved.table, saved.dim) != (self.table, self.dim):
            raise FailedPrecondition(
                f"load_state_dict: the layer's table is {self.table} of dim {self.dim}, the state is of {saved.table} "
                f"of dim {saved.dim}"
            )
        if saved.cluster not in clusters:
            raise FailedPrecondition(
                f"load_state_dict: the state is of table {saved.table} on cluster {saved.cluster or 'of a process'}, "
                f"whose rows are not on this one ({self.cluster or 'of a process'}); sr.restore one of its checkpoints"
            )


def renamed(state: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    """A ``state_dict`` whose handles name tables, and stand where layers do, as these are called by now.

    Args:
        renames: {saved: present} full names. A layer that has its table's name has the new one, too.
    """
    changed: dict[str, Any] = {}
    for key, value in state.items():
        path, _, last = key.rpartition(".")
        if last == EXTRA_STATE and isinstance(value, Tensor) and value.dtype is torch.uint8:
            handle = TableHandle.of_tensor(value, key)
            present = renames.get(handle.table, handle.table)
            was, now = (name.partition("/")[2] for name in (handle.table, present))
            path = now if path == was else path
            key, value = f"{path}.{EXTRA_STATE}", TableHandle(present, handle.dim, handle.cluster).to_tensor()
        changed[key] = value
    return changed
