"""The schema of a table in Python, with the fields of ``cpp_ext/schema/schema.h``, checked when an object is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from .errors import InvalidArgument, not_allowed
from .names import check_name
from .optim import MAX_FLOAT32, OPTIMIZERS, RowOptimizer

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
MAX_DIM = 16384


def _check(owner: str, name: str, value: float, allowed: str, ok: bool) -> None:
    if not ok or not math.isfinite(value) or abs(value) > MAX_FLOAT32:
        raise not_allowed(f"{owner}.{name}", value, allowed)


@dataclass(frozen=True)
class Constant:
    """Initial rows whose elements all have one value."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check("Constant", "value", self.value, "a finite number", True)


@dataclass(frozen=True)
class Uniform:
    """Initial rows whose elements are uniform in [low, high)."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _check("Uniform", "low", self.low, "a finite number", True)
        _check("Uniform", "high", self.high, f"a finite number >= low ({self.low})", self.high >= self.low)


@dataclass(frozen=True)
class Normal:
    """Initial rows whose elements are normal, with ``mean`` and standard deviation ``std``."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check("Normal", "mean", self.mean, "a finite number", True)
        _check("Normal", "std", self.std, ">= 0", self.std >= 0)


@dataclass(frozen=True)
class XavierUniform:
    """Initial rows uniform in [-bound, bound) with bound = gain * sqrt(6 / (num_rows + dim)), as
    ``torch.nn.init.xavier_uniform_`` (Glorot & Bengio 2010).
    """

    num_rows: int
    gain: float = 1.0

    def __post_init__(self) -> None:
        _check("XavierUniform", "num_rows", self.num_rows, ">= 1", self.num_rows >= 1)
        _check("XavierUniform", "gain", self.gain, "> 0", self.gain > 0)


@dataclass(frozen=True)
class XavierNormal:
    """Initial rows normal with std = gain * sqrt(2 / (num_rows + dim)), as ``torch.nn.init.xavier_normal_`` (Glorot &
    Bengio 2010).
    """

    num_rows: int
    gain: float = 1.0

    def __post_init__(self) -> None:
        _check("XavierNormal", "num_rows", self.num_rows, ">= 1", self.num_rows >= 1)
        _check("XavierNormal", "gain", self.gain, "> 0", self.gain > 0)


Init: TypeAlias = Constant | Uniform | Normal | XavierUniform | XavierNormal


EvictBy: TypeAlias = Literal["lru", "lfu"]
Placement: TypeAlias = Literal["servers", "device"]
PLACEMENTS: tuple[Placement, ...] = ("servers", "device")
EVICT_BY: tuple[EvictBy, ...] = ("lru", "lfu")
SWEEP_RULES = ("steps", "seconds", "norm", "bound")  # in the order of the native enum
_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class RowPolicy:
    """Which keys of a table get a row, which rows are removed, and how many stay in memory (docs/admission.md).

    Args:
        admit_after: the number of the push that gives a key its row; the gradients of earlier pushes are dropped.
        admit_probability: the probability that a push gives its key a row; below 1 it needs ``admit_after`` 1.
        admit_capacity: how many keys without a row the whole table counts pushes of, with ``admit_after``.
        evict_after_steps: the number of steps without a push after which a row is removed; 0 means never.
        evict_after_seconds: the seconds without a push after which a row is removed; 0 means never.
        evict_below_norm: the L2 norm of the weights below which a row is removed; 0 means that no row is.
        max_rows: the bound on the rows of the whole table, beyond which ``evict_by`` chooses rows to remove; 0 means no
            bound.
        max_bytes: the bound on the bytes of weights and state of the whole table; 0 means no bound.
        evict_by: the rows that are removed first. ``lru``: those with the oldest last push; ``lfu``: those with the
            fewest pushes.
        ram_share: the share of each shard's memory budget that the table's rows have to themselves and do not exceed; 0
            reserves none.

    Raises:
        InvalidArgument: a value is out of its range, or has no effect beside the others.
    """

    admit_after: int = 1
    admit_probability: float = 1.0
    admit_capacity: int = 10_000_000
    evict_after_steps: int = 0
    evict_after_seconds: int = 0
    evict_below_norm: float = 0.0
    max_rows: int = 0
    max_bytes: int = 0
    evict_by: EvictBy = "lru"
    ram_share: float = 0.0

    def __post_init__(self) -> None:
        def check(name: str, allowed: str, ok: bool) -> None:
            _check("RowPolicy", name, getattr(self, name), allowed, ok)

        check("admit_after", "1 to 255", 1 <= self.admit_after <= 255)
        probability = self.admit_probability
        check("admit_probability", "above 0, at most 1", 0 < probability <= 1)
        check("admit_probability", "1 with admit_after > 1: one of the two", self.admit_after == 1 or probability == 1)
        check("admit_capacity", "1 to 2**40 - 1", 1 <= self.admit_capacity < 2**40)
        is_used = self.admit_after > 1 or self.admit_capacity == RowPolicy.admit_capacity
        check("admit_capacity", f"{RowPolicy.admit_capacity} without admit_after > 1, as nothing is counted", is_used)
        check("evict_after_steps", f"0 to {_LONGEST}", 0 <= self.evict_after_steps <= _LONGEST)
        check("evict_after_seconds", f"0 to {_LONGEST}", 0 <= self.evict_after_seconds <= _LONGEST)
        check("evict_below_norm", "a finite number >= 0", self.evict_below_norm >= 0)
        check("max_rows", "0 to 2**63 - 1", 0 <= self.max_rows < 2**63)
        check("max_bytes", "0 to 2**63 - 1", 0 <= self.max_bytes < 2**63)
        if self.evict_by not in EVICT_BY:
            raise not_allowed("RowPolicy.evict_by", self.evict_by, EVICT_BY)
        if self.evict_by != "lru" and not self.max_rows and not self.max_bytes:
            raise InvalidArgument(
                f"RowPolicy.evict_by: {self.evict_by!r} is not allowed without max_rows or max_bytes; allowed: lru"
            )
        check("ram_share", "0 to 0.9", 0 <= self.ram_share <= 0.9)

    @property
    def sweeps(self) -> bool:
        """Whether the policy ever removes rows."""
        return any(
            (self.evict_after_steps, self.evict_after_seconds, self.evict_below_norm, self.max_rows, self.max_bytes)
        )


@dataclass(frozen=True)
class Table:
    """The options of one table in ``distribute(tables={pattern: Table(...)})``; None means the default of
    ``distribute``.

    Args:
        dtype: the dtype of stored weights. Optimizer state is always float32.
        init: the initial rows, which keys without a push have.
        optimizer: the optimizer in place of the one given to ``distribute``; a torch optimizer is allowed where the
            servers have its counterpart.
        seed: the seed of initial rows and stochastic rounding; None means 0.
        admit_after: see :class:`RowPolicy`.
        admit_probability: see :class:`RowPolicy`.
        admit_capacity: see :class:`RowPolicy`.
        evict_after_steps: see :class:`RowPolicy`.
        evict_after_seconds: see :class:`RowPolicy`.
        evict_below_norm: see :class:`RowPolicy`.
        max_rows: see :class:`RowPolicy`.
        max_bytes: see :class:`RowPolicy`.
        evict_by: see :class:`RowPolicy`.
        ram_share: see :class:`RowPolicy`.
        placement: ``servers``: the rows are on the parameter servers. ``device``: they are spread over the devices of
            the job's ranks (docs/device-tables.md), for float32 and without admission and eviction.

    Raises:
        InvalidArgument: a value is out of its range.
    """

    dtype: Dtype | None = None
    init: Init | None = None
    optimizer: Any = None  # worker/session/row_optimizers.py checks it: this module must not import torch
    seed: int | None = None
    admit_after: int = 1
    admit_probability: float = 1.0
    admit_capacity: int = RowPolicy.admit_capacity
    evict_after_steps: int = 0
    evict_after_seconds: int = 0
    evict_below_norm: float = 0.0
    max_rows: int = 0
    max_bytes: int = 0
    evict_by: EvictBy = "lru"
    ram_share: float = 0.0
    placement: Placement = "servers"

    @property
    def policy(self) -> RowPolicy:
        """The table's policy of admission, eviction and memory."""
        return RowPolicy(**{part.name: getattr(self, part.name) for part in fields(RowPolicy)})

    def __post_init__(self) -> None:
        try:
            self.policy  # noqa: B018 -- checks the fields
        except InvalidArgument as error:
            raise InvalidArgument(str(error).replace("RowPolicy.", "Table.", 1)) from None
        if self.dtype is not None and self.dtype not in DTYPES:
            raise not_allowed("Table.dtype", self.dtype, DTYPES)
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise not_allowed("Table.seed", self.seed, "[0, 2**64)")
        if self.placement not in PLACEMENTS:
            raise not_allowed("Table.placement", self.placement, PLACEMENTS)
        if self.placement == "device":
            self._check_on_devices()

    def _check_on_devices(self) -> None:
        if self.dtype not in (None, "float32"):
            raise not_allowed("Table.dtype", self.dtype, "float32 with placement 'device'")
        for part in fields(RowPolicy):
            given = getattr(self, part.name)
            if given != part.default:
                raise not_allowed(f"Table.{part.name}", given, f"{part.default!r} with placement 'device'")


@dataclass(frozen=True)
class TableSchema:
    """The schema of a table, as every process knows it. The coordinator assigns ``id`` and ``version``; before that,
    ``id`` is 0 and ``version`` is 1.
    """

    namespace: str
    name: str
    dim: int
    optimizer: RowOptimizer
    dtype: Dtype = "float32"
    init: Init = field(default_factory=Constant)
    seed: int = 0
    policy: RowPolicy = field(default_factory=RowPolicy)
    id: int = 0
    version: int = 1

    def __post_init__(self) -> None:
        for part in ("namespace", "name"):
            check_name(f"TableSchema.{part}", getattr(self, part))
        if not 1 <= self.dim <= MAX_DIM:
            raise not_allowed("TableSchema.dim", self.dim, f"[1, {MAX_DIM}]")
        given: Any = self.optimizer
        if not isinstance(given, RowOptimizer):
            allowed = [each.__name__ for each in OPTIMIZERS.values()]
            raise not_allowed("TableSchema.optimizer", self.optimizer, allowed)
        if self.dtype not in DTYPES:
            raise not_allowed("TableSchema.dtype", self.dtype, DTYPES)
        if not 0 <= self.seed < 2**64:
            raise not_allowed("TableSchema.seed", self.seed, "[0, 2**64)")

    @property
    def full_name(self) -> str:
        """The name ``namespace/name``, whose hash is the table id."""
        return f"{self.namespace}/{self.name}"
