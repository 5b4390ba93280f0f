"""The sections ``train.dense_optimizer`` and ``train.row_optimizer`` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .. import schema
from ..errors import InvalidArgument
from .config import StrictModel


class DenseOptimizerConfig(StrictModel):
    """Optimizer of the dense tower: torch's own in the worker, or with ``train.dense`` ps the servers' like it."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = Field("adam", description="Which of torch.optim.")
    lr: float = Field(1e-3, ge=0, le=1e3, description="Learning rate.")
    weight_decay: float = Field(0.0, ge=0, le=1e3, description="As torch defines it for that optimizer.")

    def row_optimizer(self) -> schema.RowOptimizer:
        """The same optimizer on the servers, with ``train.dense`` ps.

        Raises:
            InvalidArgument: the servers have none of that kind.
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
    """SGD with optional momentum, on each row."""

    kind: Literal["sgd"] = Field(description="Which optimizer.")
    lr: float = Field(0.05, ge=0, le=1e3, description="Learning rate.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum.")

    def row_optimizer(self) -> schema.SGD:
        """As a table's schema holds it."""
        return schema.SGD(lr=self.lr, momentum=self.momentum)


class _AccumulatorConfig(StrictModel):
    kind: str = Field(description="Which optimizer.")
    lr: float = Field(0.05, ge=0, le=1e3, description="Learning rate.")
    eps: float = Field(1e-10, gt=0, le=1, description="Added to the root of the accumulator.")
    initial_accumulator: float = Field(0.0, ge=0, le=1e6, description="Accumulator of a row before its first update.")


class AdagradConfig(_AccumulatorConfig):
    """Adagrad, on each row."""

    kind: Literal["adagrad"] = Field(description="Which optimizer.")

    def row_optimizer(self) -> schema.Adagrad:
        """As a table's schema holds it."""
        return schema.Adagrad(lr=self.lr, eps=self.eps, initial_accumulator=self.initial_accumulator)


class RowWiseAdagradConfig(_AccumulatorConfig):
    """Adagrad with one accumulator a row; torch has none, so it needs backend ps."""

    kind: Literal["rowwise_adagrad"] = Field(description="Which optimizer.")

    def row_optimizer(self) -> schema.RowWiseAdagrad:
        """As a table's schema holds it."""
        return schema.RowWiseAdagrad(lr=self.lr, eps=self.eps, initial_accumulator=self.initial_accumulator)


class AdamConfig(StrictModel):
    """Adam, on each row; bias correction counts the row's own updates, which torch has not, so it needs backend ps."""

    kind: Literal["adam"] = Field(description="Which optimizer.")
    lr: float = Field(1e-3, ge=0, le=1e3, description="Learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, le=1, description="Added to the root of the second moment.")

    def row_optimizer(self) -> schema.Adam:
        """As a table's schema holds it."""
        return schema.Adam(lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps)


RowOptimizerConfig: TypeAlias = Annotated[
    SgdConfig | AdagradConfig | RowWiseAdagradConfig | AdamConfig, Field(discriminator="kind")
]
