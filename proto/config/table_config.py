"""The section ``tables`` of a job: where its tables are, what their rows are, and which of them they keep."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from ..options.path_text import PathText
from ..options.strict_model import Bytes, Seconds, StrictModel
from ..schema import Constant, Dtype, Init, Normal, RowPolicy, Table, Uniform
from .optimizer_config import RowOptimizerConfig


class UniformInit(StrictModel):
    """Initial rows whose elements are uniform in [low, high)."""

    kind: Literal["uniform"] = Field(description="Which distribution.")
    low: float = Field(-0.05, ge=-1e6, le=1e6, description="Least value.")
    high: float = Field(0.05, ge=-1e6, le=1e6, description="Bound of the values; it is at least low.")

    def init(self) -> Init:
        """Returns the distribution in the form that a table's schema holds."""
        return Uniform(self.low, self.high)

    @model_validator(mode="after")
    def _is_an_interval(self) -> UniformInit:
        self.init()
        return self


class NormalInit(StrictModel):
    """Initial rows whose elements are normal."""

    kind: Literal["normal"] = Field(description="Which distribution.")
    mean: float = Field(0.0, ge=-1e6, le=1e6, description="Mean.")
    std: float = Field(1.0, ge=0, le=1e6, description="Standard deviation.")

    def init(self) -> Init:
        """Returns the distribution in the form that a table's schema holds."""
        return Normal(self.mean, self.std)


class ConstantInit(StrictModel):
    """Initial rows whose elements all have one value."""

    kind: Literal["constant"] = Field(description="Which distribution.")
    value: float = Field(0.0, ge=-1e6, le=1e6, description="The value.")

    def init(self) -> Init:
        """Returns the distribution in the form that a table's schema holds."""
        return Constant(self.value)


InitConfig: TypeAlias = Annotated[UniformInit | NormalInit | ConstantInit, Field(discriminator="kind")]


class TableConfig(StrictModel):
    """Where a table is ([tables on devices](device-tables.md)), what its rows are, and which of them there are
    ([admission](admission.md)).
    """

    placement: Literal["servers", "device", "auto"] = Field(
        "servers",
        description="Where the rows are. servers: on the parameter servers. device: spread over the devices of the "
        "workers, which must step together. auto: device where the job allows it and sparserow plan would choose it.",
    )

    dtype: Dtype = Field("float32", description="Dtype of the stored weights; the optimizer's state is float32.")
    optimizer: RowOptimizerConfig | None = Field(
        None,
        description="Optimizer of the rows; null: train.row_optimizer.",
        json_schema_extra={"allowed": "a section with kind: sgd, adagrad, rowwise_adagrad or adam"},
    )
    init: InitConfig | None = Field(
        None,
        description="What a row is before its first push; null: as the model initialises the layer, and with weights "
        "zeros.",
        json_schema_extra={"allowed": "a section with kind: uniform, normal or constant"},
    )
    frozen: bool = Field(
        False,
        description="Whether the rows are read and never trained; another job may train them. It needs a class of "
        "one's own.",
    )
    weights: Annotated[PathText | None, Field(min_length=1)] = Field(
        None,
        description="Parquet or safetensors file with the rows of a frozen table, as sparserow table export writes it; "
        "null: those of the layer, or those that are there.",
        json_schema_extra={"allowed": "a path or URL that ends in .parquet or .safetensors"},
    )
    admit_after: int = Field(
        1,
        ge=1,
        le=255,
        description="Number of the push that gives a key its row; the gradients of earlier pushes are dropped.",
    )
    admit_probability: float = Field(
        1.0, gt=0, le=1, description="Probability that a push gives its key a row; below 1 it needs admit_after 1."
    )
    admit_capacity: int = Field(
        RowPolicy.admit_capacity,
        ge=1,
        lt=2**40,
        description="Number of keys without a row whose pushes admit_after counts.",
    )
    evict_after_steps: int = Field(
        0, ge=0, lt=2**31, description="Number of steps without a push after which a row is removed; 0: never."
    )
    evict_after: Seconds | None = Field(
        None, ge=1, lt=2**31, description="Seconds without a push after which a row is removed; null: never."
    )
    evict_below_norm: float = Field(
        0.0,
        ge=0,
        le=1e30,
        description="A row is removed when the L2 norm of its weights is smaller; 0: none is removed.",
    )
    max_rows: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Bound on the rows of the whole table; evict_by chooses which rows beyond it are removed. 0: no "
        "bound.",
    )
    max_bytes: Bytes | None = Field(
        None, ge=1, lt=2**63, description="Bound on the bytes of weights and state of the whole table; null: no bound."
    )
    evict_by: Literal["lru", "lfu"] = Field(
        "lru",
        description="Which rows are removed first. lru: those with the oldest last push. lfu: those with the fewest "
        "pushes.",
    )
    ram_share: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="Share of each shard's memory_budget that is reserved for the table; 0: none. It needs an SSD.",
    )

    def options(self, init: Init | None, seed: int) -> Table:
        """Returns the options of ``distribute``, with the placement on servers.

        Args:
            init: the initial rows where the section names none; None: those of the layer.
            seed: the seed of initial rows.
        """
        if self.init is not None:
            init = self.init.init()
        elif self.weights is not None:
            init = Constant(0.0)
        optimizer = None if self.optimizer is None else self.optimizer.row_optimizer()
        return Table(dtype=self.dtype, init=init, optimizer=optimizer, seed=seed, **asdict(self.policy()))

    def policy(self) -> RowPolicy:
        """Returns the policy in the form that a table's schema holds."""
        return RowPolicy(
            admit_after=self.admit_after,
            admit_probability=self.admit_probability,
            admit_capacity=self.admit_capacity,
            evict_after_steps=self.evict_after_steps,
            evict_after_seconds=round(self.evict_after or 0),
            evict_below_norm=self.evict_below_norm,
            max_rows=self.max_rows,
            max_bytes=self.max_bytes or 0,
            evict_by=self.evict_by,
            ram_share=self.ram_share,
        )

    @model_validator(mode="after")
    def _is_a_policy(self) -> TableConfig:
        policy = self.policy()
        if self.weights is not None and not self.frozen:
            raise InvalidArgument("weights: has no effect without frozen; remove it")
        if self.frozen and self.optimizer is not None:
            raise InvalidArgument("optimizer: has no effect with frozen, as no row is trained; remove it")
        if self.frozen and (policy != RowPolicy() or self.placement != "servers"):
            raise InvalidArgument(
                "frozen: excludes options of admission, eviction and memory; allowed placement: servers"
            )
        return self
