"""The section ``train`` of a job file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..optim import OPTIMIZERS
from ..options.strict_model import Seconds, StrictModel
from ..schema import Dtype
from ..transport import Transport
from .cache_config import CacheConfig
from .checkpoint_config import CheckpointConfig
from .elastic_config import ElasticConfig
from .evaluate_config import EvaluateEveryConfig
from .node_check_config import NodeCheckConfig
from .optimizer_config import AdagradConfig, DenseOptimizerConfig, RowOptimizerConfig
from .parallel_config import ParallelConfig
from .schedule import ConstantSchedule, ScheduleConfig
from .spike_config import SpikeConfig
from .table_config import TableConfig


class TrainConfig(StrictModel):
    """How the model is trained."""

    epochs: int = Field(1, ge=1, le=10_000, description="Passes over the training files.")
    batch_size: int = Field(2048, ge=1, le=1 << 20, description="Samples in a micro-batch of one worker.")
    accumulate: int = Field(
        1,
        ge=1,
        le=1 << 16,
        description="Micro-batches in a step; the step equals one with a single batch of accumulate times batch_size.",
    )
    workers: int = Field(
        1, ge=1, le=256, description="Worker processes on this machine; torchrun's count has precedence."
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of the initial weights and rows, of dropout and of shuffling."
    )
    staleness: int | None = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Number of steps by which the rows that a worker reads may lag behind; 0: synchronous. "
        "null: asynchronous.",
    )
    quorum: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Number of workers whose gradients make a step: the first that are done with it. The others drop "
        "theirs and go on with the next open step, so results depend on timing. Needs dense ps and staleness 0. null: "
        "all workers.",
    )
    dense: Literal["ddp", "ps"] = Field(
        "ddp",
        description="ddp: workers average dense gradients each step. ps: the dense tower lives on the servers as well; "
        "workers do not wait for each other, and may die.",
    )
    prefetch: int = Field(
        0,
        ge=0,
        le=64,
        description="Number of steps whose batches and rows are fetched early, in the background; 0: none. Rows are as "
        "fresh as those fetched in their step, but for a row cache, whose bound holds then.",
    )
    prefetch_hints: int = Field(
        0,
        ge=0,
        le=1024,
        description="Number of batches beyond prefetch that are loaded as well, so that shards bring their rows from "
        "the SSD to memory.",
    )
    cache: CacheConfig | None = Field(
        None,
        description="Row cache of each worker; null: none.",
        json_schema_extra={"allowed": "a section with bytes"},
    )
    checkpoint: CheckpointConfig | None = Field(
        None,
        description="Where and when the job is saved; null: never.",
        json_schema_extra={"allowed": "a section with url"},
    )
    elastic: ElasticConfig | None = Field(
        None,
        description="For workers that come and go: samples are leased to the workers that are there, and a worker that "
        "ends is started again. null: each worker trains on a fixed share of the samples.",
        json_schema_extra={"allowed": "a section with lease_rows, {} for its defaults"},
    )
    test_every: EvaluateEveryConfig | None = Field(
        None,
        description="When the test files are scored within an epoch as well; metrics.best and metrics.stop take such "
        "tests as those after an epoch. null: after each epoch alone.",
        json_schema_extra={"allowed": "a section with exactly one of steps, samples and seconds"},
    )
    spike: SpikeConfig | None = Field(
        None,
        description="When a loss that jumps sets the job back to its newest checkpoint before the jump; null: never.",
        json_schema_extra={"allowed": "a section with factor"},
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device of the model. cuda: each worker has a CUDA device of its own, and rows cross to it. auto: "
        "cuda where every worker of a machine has one, train.dense is ddp and no process has a part of the tower, else "
        "cpu.",
    )
    node_check: NodeCheckConfig | None = Field(
        None,
        description="Check of all nodes before the job begins, under torchrun or on Ray; null: none.",
        json_schema_extra={"allowed": "a section with slower_than and timeout, {} for its defaults"},
    )
    parallel: ParallelConfig | None = Field(
        None,
        description="For a dense tower that processes share, or its optimizer's state; null: each process has it whole "
        "(DDP).",
        json_schema_extra={"allowed": "a section with shard or tensor"},
    )
    timeout: Seconds = Field(
        1800.0,
        ge=1,
        le=7 * 86400,
        description="Time that a collective call of a step may take, and that a worker which others wait for may give "
        "no sign of life.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads of torch in each worker; 0: the cores it may use, divided by the workers of its host.",
    )
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65279,
        description="Port of the Prometheus page of rank 0; the page of rank r is r ports further. null: no page.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address that the Prometheus pages listen on.")
    schedule: ScheduleConfig = Field(
        ConstantSchedule(),
        description="Schedule of the learning rates of the dense tower and the tables, by step or by epoch.",
        json_schema_extra={"allowed": "a section with kind: constant, step, cosine or linear"},
    )
    amp: Literal["none", "bfloat16", "float16"] = Field(
        "none",
        description="Dtype of torch.autocast; float16 uses a GradScaler, and the steps that it skips count as refused.",
    )
    activation_checkpointing: bool = Field(
        False, description="Whether the MLPs keep only their inputs and compute their activations again in backward."
    )
    find_unused_parameters: bool = Field(
        False,
        description="Whether DDP looks at each step which parameters the forward used: for a class with a branch that "
        "a batch may not take. It needs 2 workers.",
    )
    wire_dtype: Dtype = Field(
        "float32",
        description="Dtype of rows and gradients on the network between workers and servers; in 16 bits each row that "
        "is sent has an exponent of its own, and a pulled one beyond the dtype is refused.",
    )
    transport: Transport = Field(
        "auto",
        description="How rows travel between workers and servers. auto: through shared memory from each server of the "
        "worker's host and user, by TCP from all others, and with TLS. tcp: by TCP alone. shm: through shared memory "
        "alone.",
    )
    grad_scale: Literal["mean", "sum"] = Field(
        "mean",
        description="How the gradients of a row are joined. mean: their sum by the number of workers, as the dense "
        "tower's are. sum: their sum.",
    )
    namespace_policy: Literal["continue", "new"] | None = Field(
        None,
        description="What happens to tables that the job's namespace has on a running cluster. continue: their rows "
        "are trained on. new: they are refused. null: continue, and a line names them.",
    )
    features_policy: Literal["keep", "refit"] = Field(
        "keep",
        description="What happens where the job's namespace keeps the statistics and vocabularies of an earlier run, "
        "which say what its keys and numbers mean. keep: they are used, and others are refused. refit: those of this "
        "run take their place, and rows that were trained before mean something else.",
    )
    clip_norm: float | None = Field(
        None, gt=0, le=1e30, description="Bound on the total L2 norm of the dense gradients; null: no clipping."
    )
    clip_row_norm: float | None = Field(
        None,
        gt=0,
        le=1e30,
        description="Bound on the L2 norm of a row's gradient, summed over a worker's step; null: no clipping.",
    )
    on_nonfinite: Literal["raise", "skip"] = Field(
        "raise",
        description="All workers refuse a step with NaN or Inf. raise: the job ends. skip: it continues and counts the "
        "step.",
    )
    dense_optimizer: DenseOptimizerConfig = Field(DenseOptimizerConfig(), description="Optimizer of the dense tower.")
    row_optimizer: RowOptimizerConfig = Field(
        AdagradConfig(kind="adagrad"),
        description="Optimizer of the tables, which the parameter servers apply.",
        json_schema_extra={"allowed": f"a section with kind: {', '.join(OPTIMIZERS)}"},
    )

    def row_optimizer_of(self, table: TableConfig | None) -> RowOptimizerConfig:
        """Returns the optimizer of a table: that of its section, or the job's where it has none."""
        own = None if table is None else table.optimizer
        return self.row_optimizer if own is None else own

    @property
    def parts(self) -> ParallelConfig | None:
        """The section ``parallel`` where processes have the tower in parts; None where each has it whole."""
        return self.parallel if self.parallel is not None and self.parallel.has_parts else None

    @property
    def is_on_host(self) -> bool:
        """Whether no worker's model is on a CUDA device, whatever devices there are.

        Towers in parts were not run on CUDA yet, so ``auto`` does not take them there.
        """
        return self.device == "cpu" or self.dense == "ps" or (self.parts is not None and self.device != "cuda")
