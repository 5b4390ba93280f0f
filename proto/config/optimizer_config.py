"""The sections ``train.dense_optimizer`` and ``train.row_optimizer`` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from ..optim import FTRL, LAMB, OPTIMIZERS, SGD, Adadelta, Adagrad, Adam, Lion, RMSprop, RowOptimizer, RowWiseAdagrad
from ..options.strict_model import FromList, StrictModel

_Fraction = Annotated[float, Field(ge=0, lt=1)]
Betas: TypeAlias = Annotated[tuple[_Fraction, _Fraction], FromList]
_Rate = Annotated[float, Field(ge=0, le=1e3, description="Learning rate.")]


class DenseOptimizerConfig(StrictModel):
    """Optimizer of the dense tower: torch's in the worker, or with ``train.dense`` ps the servers' of the same kind."""

    kind: Literal["adam", "adamw", "adagrad", "sgd"] = Field("adam", description="Optimizer in torch.optim.")
    lr: float = Field(1e-3, ge=0, le=1e3, description="Learning rate.")
    weight_decay: float = Field(0.0, ge=0, le=1e3, description="Weight decay, as torch defines it for that optimizer.")

    def row_optimizer(self) -> RowOptimizer:
        """Returns the schema of the same optimizer on the servers, for ``train.dense`` ps."""
        kind = OPTIMIZERS[self.kind.removesuffix("w")]
        is_decoupled = self.kind == "adamw"
        return kind(lr=self.lr, weight_decay=self.weight_decay, decoupled=is_decoupled)


class _RowOptimizerConfig(StrictModel):
    kind: str = Field(description="Kind of optimizer.")
    lr: _Rate
    weight_decay: float = Field(0.0, ge=0, le=1e3, description="Weight decay.")
    decoupled: bool = Field(
        False, description="Whether the decay multiplies the weights by 1 - lr * weight_decay, or joins the gradient."
    )

    def row_optimizer(self) -> RowOptimizer:
        """Returns the optimizer in the form that a table's schema holds."""
        return OPTIMIZERS[self.kind](**self.model_dump(exclude={"kind"}))


class SgdConfig(_RowOptimizerConfig):
    """SGD with optional momentum, applied to each row."""

    kind: Literal["sgd"] = Field(description="Kind of optimizer.")
    lr: _Rate = SGD.lr
    momentum: float = Field(SGD.momentum, ge=0, lt=1, description="Momentum.")
    dampening: float = Field(
        SGD.dampening, ge=0, le=1, description="Share of the gradient that does not enter the momentum."
    )
    nesterov: bool = Field(
        SGD.nesterov, description="Whether a step looks ahead by the momentum; it needs momentum, and dampening 0."
    )

    @model_validator(mode="after")
    def _options_fit(self) -> SgdConfig:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise InvalidArgument("nesterov: needs momentum > 0 and dampening = 0")
        if self.dampening and self.momentum == 0:
            raise InvalidArgument("dampening: has no effect without momentum; remove it")
        return self


class _AccumulatorConfig(_RowOptimizerConfig):
    eps: float = Field(Adagrad.eps, gt=0, le=1, description="Added to the root of the accumulator.")
    initial_accumulator: float = Field(
        Adagrad.initial_accumulator, ge=0, le=1e6, description="Accumulator of a row before its first update."
    )
    accumulator_decay: float = Field(
        Adagrad.accumulator_decay,
        gt=0,
        le=1,
        description="Factor of the accumulator before each sum; 1 forgets nothing.",
    )


class AdagradConfig(_AccumulatorConfig):
    """Adagrad, applied to each row."""

    kind: Literal["adagrad"] = Field(description="Kind of optimizer.")
    lr: _Rate = Adagrad.lr


class RowWiseAdagradConfig(_AccumulatorConfig):
    """Adagrad with one accumulator for each row."""

    kind: Literal["rowwise_adagrad"] = Field(description="Kind of optimizer.")
    lr: _Rate = RowWiseAdagrad.lr


class AdamConfig(_RowOptimizerConfig):
    """Adam, applied to each row; AdamW with ``decoupled`` true. Bias correction counts the updates of the row."""

    kind: Literal["adam"] = Field(description="Kind of optimizer.")
    lr: _Rate = Adam.lr
    betas: Betas = Field(Adam.betas, description="Decays of the first and of the second moment.")
    eps: float = Field(Adam.eps, gt=0, le=1, description="Added to the root of the second moment.")
    amsgrad: bool = Field(
        Adam.amsgrad, description="Whether the largest second moment so far replaces the present one."
    )


class RmspropConfig(_RowOptimizerConfig):
    """RMSprop, applied to each row."""

    kind: Literal["rmsprop"] = Field(description="Kind of optimizer.")
    lr: _Rate = RMSprop.lr
    alpha: float = Field(RMSprop.alpha, ge=0, lt=1, description="Decay of the mean square.")
    eps: float = Field(RMSprop.eps, gt=0, le=1, description="Added to the root of the mean square.")
    momentum: float = Field(RMSprop.momentum, ge=0, lt=1, description="Momentum.")
    centered: bool = Field(RMSprop.centered, description="Whether the mean of gradients is taken off the mean square.")


class AdadeltaConfig(_RowOptimizerConfig):
    """Adadelta, applied to each row."""

    kind: Literal["adadelta"] = Field(description="Kind of optimizer.")
    lr: float = Field(Adadelta.lr, ge=0, le=1e3, description="Factor of each step.")
    rho: float = Field(Adadelta.rho, ge=0, lt=1, description="Decay of both mean squares.")
    eps: float = Field(Adadelta.eps, gt=0, le=1, description="Added to both mean squares.")


class LionConfig(_RowOptimizerConfig):
    """Lion, applied to each row."""

    kind: Literal["lion"] = Field(description="Kind of optimizer.")
    lr: _Rate = Lion.lr
    betas: Betas = Field(
        Lion.betas, description="Decays of the momentum in the mean whose sign is taken, and of the momentum."
    )
    decoupled: bool = Field(
        Lion.decoupled,
        description="Whether the decay multiplies the weights by 1 - lr * weight_decay, or joins the gradient.",
    )


class LambConfig(_RowOptimizerConfig):
    """LAMB with one trust ratio for each row."""

    kind: Literal["lamb"] = Field(description="Kind of optimizer.")
    lr: _Rate = LAMB.lr
    betas: Betas = Field(LAMB.betas, description="Decays of the first and of the second moment.")
    eps: float = Field(LAMB.eps, gt=0, le=1, description="Added to the root of the second moment.")
    decoupled: bool = Field(
        LAMB.decoupled, description="Whether the decay joins the update that the trust ratio scales, or the gradient."
    )


class FtrlConfig(_RowOptimizerConfig):
    """FTRL-proximal, applied to each row. It needs backend ps.

    With ``l1`` or ``group_lasso`` the rows of a model of Sparserow begin with 0, unless ``model.args.init_scale`` is
    given; those of a class of one's own begin as the class says.
    """

    kind: Literal["ftrl"] = Field(description="Kind of optimizer.")
    lr: _Rate = FTRL.lr
    beta: float = Field(FTRL.beta, gt=0, le=1e6, description="Added to the root of the sum of squared gradients.")
    l1: float = Field(FTRL.l1, ge=0, le=1e6, description="Factor of the weights' L1 norm, which makes weights 0.")
    l2: float = Field(FTRL.l2, ge=0, le=1e6, description="Factor of half the weights' squared L2 norm.")
    group_lasso: float = Field(
        FTRL.group_lasso, ge=0, le=1e6, description="Factor of sqrt(dim) times a row's L2 norm, which makes rows 0."
    )


RowOptimizerConfig: TypeAlias = Annotated[
    SgdConfig
    | AdagradConfig
    | RowWiseAdagradConfig
    | AdamConfig
    | RmspropConfig
    | AdadeltaConfig
    | LionConfig
    | LambConfig
    | FtrlConfig,
    Field(discriminator="kind"),
]
