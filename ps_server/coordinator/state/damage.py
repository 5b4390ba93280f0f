"""Which tables have rows of no one instant, because a restore of them is under way or has failed. No I/O."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.errors import FailedPrecondition, SparserowError, Unavailable


@dataclass
class Damage:
    """A restore that empties tables, from before the first is emptied until all of them have their rows.

    Attributes:
        source: ``URL/NAME`` of the checkpoint.
        table_ids: tables whose rows are refused.
        failure: why the restore failed; empty: it is under way.
        request: what was asked for, where the coordinator itself can begin the restore anew; None: a job's workers do.
    """

    source: str
    table_ids: set[int]
    failure: str = ""
    request: pb.RestoreRequest | None = None

    @property
    def text(self) -> str:
        """What a user is told."""
        if not self.failure:
            return f"rows are being restored from {self.source}"
        return (
            f"the cluster is damaged, since the restore of {self.source} failed ({self.failure}); restore a checkpoint"
        )

    def error(self) -> SparserowError:
        """Unavailable while the restore goes on, FailedPrecondition once it has failed."""
        return FailedPrecondition(self.text) if self.failure else Unavailable(self.text)

    def refusal(self) -> pb.Refusal:
        """As shards are told it."""
        return pb.Refusal(code=self.error().number, message=self.text, table_ids=sorted(self.table_ids))

    def without(self, table_ids: Iterable[int]) -> Damage | None:
        """What is left when these tables have their rows, or are no more; None: nothing is."""
        left = self.table_ids.difference(table_ids)
        return Damage(self.source, left, self.failure, self.request) if left else None

    def to_document(self) -> dict[str, Any]:
        """The saved form: plain values for JSON."""
        request = None if self.request is None else base64.b64encode(self.request.SerializeToString()).decode()
        return {
            "source": self.source,
            "table_ids": sorted(self.table_ids),
            "failure": self.failure,
            "request": request,
        }

    @staticmethod
    def of_document(saved: dict[str, Any]) -> Damage:
        """The value of a saved form."""
        request = saved["request"]
        return Damage(
            saved["source"],
            set(saved["table_ids"]),
            saved["failure"],
            None if request is None else pb.RestoreRequest.FromString(base64.b64decode(request)),
        )
