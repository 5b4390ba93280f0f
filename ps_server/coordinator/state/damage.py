"""Notes which tables lack rows, because a restore of them is under way or has failed. The module does no I/O."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.errors import FailedPrecondition, SparserowError, Unavailable
from ....proto.status.alarms import RESTORE_UNDER_WAY


@dataclass
class Damage:
    """A restore that empties tables, from before the first table is emptied until all of them have their rows.

    Attributes:
        source: the checkpoint, as ``URL/NAME``.
        table_ids: the tables whose rows are refused.
        failure: why the restore failed; empty while it is under way.
        request: the request, when the coordinator itself can begin the restore again; None when a job's workers have
            to.
    """

    source: str
    table_ids: set[int]
    failure: str = ""
    request: pb.RestoreRequest | None = None

    @property
    def text(self) -> str:
        """The sentence that users and clients see."""
        if not self.failure:
            return f"{RESTORE_UNDER_WAY} {self.source}"
        return (
            f"the cluster is damaged, because the restore of {self.source} failed ({self.failure}); restore a "
            f"checkpoint"
        )

    def error(self) -> SparserowError:
        """Returns Unavailable while the restore is under way, and FailedPrecondition once it has failed."""
        return FailedPrecondition(self.text) if self.failure else Unavailable(self.text)

    def refusal(self) -> pb.Refusal:
        """Returns the refusal in the form that shards receive."""
        return pb.Refusal(code=self.error().number, message=self.text, table_ids=sorted(self.table_ids))

    def without(self, table_ids: Iterable[int]) -> Damage | None:
        """Returns the damage that remains when these tables are whole or dropped; None when none remains."""
        left = self.table_ids.difference(table_ids)
        return Damage(self.source, left, self.failure, self.request) if left else None

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form: plain values for JSON."""
        request = None if self.request is None else base64.b64encode(self.request.SerializeToString()).decode()
        return {
            "source": self.source,
            "table_ids": sorted(self.table_ids),
            "failure": self.failure,
            "request": request,
        }

    @staticmethod
    def of_document(saved: dict[str, Any]) -> Damage:
        """Returns the damage of a saved form."""
        request = saved["request"]
        return Damage(
            saved["source"],
            set(saved["table_ids"]),
            saved["failure"],
            None if request is None else pb.RestoreRequest.FromString(base64.b64decode(request)),
        )
