"""What a job must be like so that tables may be on the devices of its workers (``tables.NAME.placement``)."""

from __future__ import annotations

from ..errors import not_allowed
from ..schema import RowPolicy
from .job_sections import JobSections
from .table_config import TableConfig


def check_placements(job: JobSections) -> None:
    """Raises InvalidArgument when the job has a table with placement device and a setting that this excludes."""
    for pattern, table in job.tables.items():
        refusal = refusal_of_devices(job, table) if table.placement == "device" else None
        if refusal is not None:
            raise not_allowed(f"tables.{pattern}.placement", "device", f"servers with {refusal}")


def refusal_of_devices(job: JobSections, table: TableConfig) -> str | None:
    """Returns the setting that keeps a table from being on devices; None when there is none.

    With placement auto such a table is on the servers.

    Args:
        job: the job.
        table: the options of the table.
    """
    train, policy, usual = job.train, table.policy(), RowPolicy()
    settings = (
        (train.staleness != 0, f"train.staleness {'null' if train.staleness is None else train.staleness}"),
        (train.dense == "ps", "train.dense ps"),
        (train.elastic is not None, "train.elastic"),
        (train.parts is not None, "train.parallel"),
        (train.row_optimizer_of(table).kind == "ftrl", "optimizer ftrl"),
        (policy != usual, "rules of admission, eviction or memory"),
    )
    return next((text for is_set, text in settings if is_set), None)
