"""The sections ``train.dense_optimizer`` and ``train.row_optimizer`` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .. import schema
from ..errors import InvalidArgument
from .config import StrictModel


class DenseOptimizerConfig(StrictModel):
    """Optimizer of the dense tower: torch's in the worker, or with ``train.dense`` ps the servers' of the same kind."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = Field("adam", description="Optimizer in torch.optim.")
    lr: float = Field(1e-3, ge=0, le=1e3, description="Learning rate.")
    weight_decay: float = Field(0.0, ge=0, le=1e3, description="Weight decay, as torch defines it for that optimizer.")

    def row_optimizer(self) -> schema.RowOptimizer:
        """Returns the schema of the same optimizer on the servers, for ``train.dense`` ps.

        Raises:
            InvalidArgument: the servers have no optimizer of that kind.
        """
        if self.kind == "adam":
            return schema.Adam(lr=self.lr, weight_decay=self.weight_decay)
        if self.kind == "adagrad":
            return schema.Adagrad(lr=self.lr, weight_decay=self.weight_decay)
        if self.kind == "sgd":
            return schema.SGD(lr=self.lr, weight_decay=self.weight_decay)
        raise InvalidArgument(
            f"train.dense_optimizer.kind: {self.kind} is not allowed with train.dense ps; allowed: adam, adagrad, sgd"
        )


class SgdConfig(StrictModel):
    """SGD with optional momentum, applied to each row."""

    kind: Literal["sgd"] = Field(description="Kind of optimizer.")
    lr: float = Field(0.05, ge=0, le=1e3, description="Learning rate.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum.")

    def row_optimizer(self) -> schema.SGD:
        """Returns the optimizer in the form that a table's schema holds."""
        return schema.SGD(lr=self.lr, momentum=self.momentum)


class _AccumulatorConfig(StrictModel):
    kind: str = Field(description="Kind of optimizer.")
    lr: float = Field(0.05, ge=0, le=1e3, description="Learning rate.")
    eps: float = Field(1e-10, gt=0, le=1, description="Added to the root of the accumulator.")
    initial_accumulator: float = Field(0.0, ge=0, le=1e6, description="Accumulator of a row before its first update.")


class AdagradConfig(_AccumulatorConfig):
    """Adagrad, applied to each row."""

    kind: Literal["adagrad"] = Field(description="Kind of optimizer.")

    def row_optimizer(self) -> schema.Adagrad:
        """Returns the optimizer in the form that a table's schema holds."""
        return schema.Adagrad(lr=self.lr, eps=self.eps, initial_accumulator=self.initial_accumulator)


class RowWiseAdagradConfig(_AccumulatorConfig):
    """Adagrad with one accumulator for each row. torch has no such optimizer, so it needs backend ps."""

    kind: Literal["rowwise_adagrad"] = Field(description="Kind of optimizer.")

    def row_optimizer(self) -> schema.RowWiseAdagrad:
        """Returns the optimizer in the form that a table's schema holds."""
        return schema.RowWiseAdagrad(lr=self.lr, eps=self.eps, initial_accumulator=self.initial_accumulator)


class AdamConfig(StrictModel):
    """Adam, applied to each row. Bias correction counts the updates of the row, which torch cannot do, so it needs
    backend ps.
    """

    kind: Literal["adam"] = Field(description="Kind of optimizer.")
    lr: float = Field(1e-3, ge=0, le=1e3, description="Learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, le=1, description="Added to the root of the second moment.")

    def row_optimizer(self) -> schema.Adam:
        """Returns the optimizer in the form that a table's schema holds."""
        return schema.Adam(lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps)


RowOptimizerConfig: TypeAlias = Annotated[
    SgdConfig | AdagradConfig | RowWiseAdagradConfig | AdamConfig, Field(discriminator="kind")
]
