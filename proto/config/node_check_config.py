"""The section ``train.node_check`` of a job file."""

from __future__ import annotations

from pydantic import Field

from ..options.strict_model import Seconds, StrictModel


class NodeCheckConfig(StrictModel):
    """Checks every node before the job begins, under torchrun or on Ray; a bad node is left out, or ends the job."""

    slower_than: float = Field(
        2.0,
        gt=1,
        le=1000,
        description="Factor above the median of all nodes from which a node is slow, in matrices, exchange or disk; "
        "32 MiB exchanged up to 0.1 s later, or 16 MiB on disk up to 1 s later, do not count.",
    )
    timeout: Seconds = Field(
        60.0,
        ge=1,
        le=3600,
        description="Time that a node has to arrive, and then for each part of the check: each exchange, matrices, "
        "disk. A node that takes longer is broken.",
    )
