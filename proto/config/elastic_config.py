"""The section ``train.elastic`` of a job file."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from ..options.path_text import PathText
from ..options.strict_model import Seconds, StrictModel
from .started_config import TOWER, Accepted, accepted_field, check_start, start_from_field


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
    start_from: PathText | None = start_from_field(
        "A run without saves of its own begins with its rows, the tower among them, over the files of this job."
    )
    accept: Accepted = accepted_field()
    save_every: Seconds = Field(30.0, gt=0, description="Time between two such saves; each holds the changes since.")
    max_restarts: int = Field(
        10,
        ge=0,
        le=1 << 20,
        description="How many times, in total, ended workers of this machine are started again; torchrun has "
        "--max-restarts instead.",
    )

    @model_validator(mode="after")
    def _start_is_another_run(self) -> ElasticConfig:
        check_start(self.start_from, self.accept, self.url)
        if any(each == TOWER or each.endswith(".dim") for each in self.accept):
            raise InvalidArgument(
                "accept: tower and TABLE.dim are not possible, as the tower is rows of the servers (train.dense ps), "
                "whose shapes cannot change; allowed: TABLE.dtype, TABLE.optimizer"
            )
        return self
