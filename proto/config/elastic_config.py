"""The section ``train.elastic`` of a job file."""

from __future__ import annotations

from pydantic import Field

from ..options.path_text import PathText
from ..options.strict_model import Seconds, StrictModel


class ElasticConfig(StrictModel):
    """How a job runs with workers that come and go."""

    lease_rows: int = Field(
        16384,
        ge=1,
        le=1 << 26,
        description="Samples that a worker leases at a time, rounded up to whole batches; they are shuffled together. "
        "When a worker dies, the samples of its lease that it had not trained on go to another worker.",
    )
    url: PathText | None = Field(
        None,
        min_length=1,
        description="Folder, by path or URL, where the coordinator saves rows and the progress of the epoch; each job "
        "needs a folder of its own. --resume auto continues from there. null: nothing is saved.",
        json_schema_extra={"allowed": "a path or a URL"},
    )
    save_every: Seconds = Field(30.0, gt=0, description="Time between two such saves; each holds the changes since.")
    max_restarts: int = Field(
        10,
        ge=0,
        le=1 << 20,
        description="How many times, in total, ended workers of this machine are started again; torchrun has "
        "--max-restarts instead.",
    )
