"""The section ``cluster`` of a job file, which ``sparserow up``, ``ps`` and ``coordinator`` share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ..checkpoint.urls import URL_FORM, check_url
from ..errors import InvalidArgument
from ..options.path_text import PathText
from ..options.strict_model import Bytes, FromList, Seconds, StrictModel
from ..route import DEFAULT_SLOT_COUNT, check_slot_count

# The smallest memory budget of a shard with an SSD. With less, a step of some thousand rows may find no room.
MIN_TIERED_BUDGET = 16 << 20


def _checked_slot_count(value: int) -> int:
    check_slot_count(value)
    return value


SlotCount = Annotated[
    int,
    AfterValidator(_checked_slot_count),
    Field(json_schema_extra={"allowed": "a power of two in [2, 65536]"}),
]


CheckpointRoot = Annotated[
    str,
    AfterValidator(lambda root: check_url("checkpoint_roots", root)),
    Field(json_schema_extra={"allowed": URL_FORM}),
]


class ClusterConfig(StrictModel):
    """Where the rows live: a running cluster (``address``), or one that the job starts and stops itself."""

    address: PathText | None = Field(
        None, description="HOST:PORT of a running coordinator; null: the job starts its own cluster."
    )
    shards: int = Field(2, ge=1, le=1024, description="Parameter-server processes to start.")
    memory_budget: Bytes | None = Field(
        None, description="Bytes of rows and indexes that each shard may hold; null: no budget."
    )
    ssd_path: PathText | None = Field(
        None,
        min_length=1,
        description="Folder on an SSD for the rows that do not fit in memory_budget; shard N uses the folder shard-N "
        "in it. null: all rows stay in memory.",
    )
    ssd_bytes: Bytes | None = Field(
        None,
        ge=64 << 20,
        description="Bytes of files that each shard may keep in ssd_path; null: as much as the disk has free.",
    )
    ssd_engine: Literal["pages", "rocksdb"] = Field(
        "pages",
        description="The storage of rows in ssd_path. pages: a log of pages, about 12.5 bytes of memory_budget for "
        "each row there, and the least work. rocksdb: a RocksDB, about 1.5 bytes of memory beside the budget for each "
        "row there, and several times the work.",
    )
    ssd_direct_io: bool = Field(
        False,
        description="Whether the engine pages reads and writes ssd_path past the system's cache, so that the memory "
        "beside memory_budget stays free for others. A file system without direct I/O is refused at the start.",
    )
    sweep_every: Seconds | None = Field(
        60.0,
        ge=0.1,
        le=1e6,
        description="Seconds between two sweeps, which remove the rows that the policy of their table no longer keeps; "
        "null: only `sparserow table sweep` removes them.",
    )
    port: int = Field(0, ge=0, le=65535, description="Port of the coordinator; 0: chosen by the system.")
    slot_count: SlotCount = Field(
        DEFAULT_SLOT_COUNT,
        description="Number of slots that rows are spread over; it is fixed for the life of a cluster.",
    )
    io_threads: int = Field(2, ge=1, le=256, description="Network threads of each shard.")
    worker_lease: Seconds = Field(
        10.0,
        ge=0.1,
        le=3600,
        description="Seconds without a heartbeat after which a worker loses its place in the job as soon as something "
        "waits for it: a step, a save, a restore, a registration. Where nothing does, it loses it after three times as "
        "long.",
    )
    shard_lease: Seconds = Field(
        10.0, ge=0.1, le=3600, description="Seconds without a heartbeat after which a shard counts as lost."
    )

    checkpoint_roots: Annotated[tuple[CheckpointRoot, ...], FromList] = Field(
        (),
        description="Absolute paths or URLs below which the cluster saves and restores checkpoints, beside "
        "train.checkpoint.url. Without any of these, every place is allowed while only this machine reaches the "
        "cluster and it asks for no tokens.",
    )

    @model_validator(mode="after")
    def _address_or_own(self) -> ClusterConfig:
        others = sorted(self.model_fields_set - {"address"})
        if self.address is not None and others:
            raise InvalidArgument(f"{others[0]} has no effect on a running cluster; remove it or remove address")
        return self

    def handed_down(self) -> str:
        """Returns the fields that were set, as JSON for ``--cluster-json`` of a child process.

        ``deploy.commands.options.cluster_config`` reads it.
        """
        return self.model_dump_json(exclude={"address"}, exclude_unset=True)

    @model_validator(mode="after")
    def _ssd_beside_memory(self) -> ClusterConfig:
        if self.ssd_bytes is not None and self.ssd_path is None:
            raise InvalidArgument("ssd_bytes has no effect without ssd_path; name a folder or remove it")
        if "ssd_engine" in self.model_fields_set and self.ssd_path is None:
            raise InvalidArgument("ssd_engine has no effect without ssd_path; name a folder or remove it")
        if self.ssd_direct_io and self.ssd_path is None:
            raise InvalidArgument("ssd_direct_io has no effect without ssd_path; name a folder or remove it")
        if self.ssd_direct_io and self.ssd_engine != "pages":
            raise InvalidArgument(
                f"ssd_direct_io: true is not allowed with ssd_engine {self.ssd_engine}; allowed: false, or "
                "ssd_engine pages"
            )
        if self.ssd_path is not None and (self.memory_budget or 0) < MIN_TIERED_BUDGET:
            raise InvalidArgument(
                f"memory_budget: {self.memory_budget} is not allowed with ssd_path; allowed: at least "
                f"{MIN_TIERED_BUDGET} bytes, the memory of the rows in use"
            )
        return self
