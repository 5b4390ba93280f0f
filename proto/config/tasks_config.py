"""The section ``tasks`` of a job file: what each output of the model is trained for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from ..options.strict_model import StrictModel

LossName: TypeAlias = Literal["bce", "mse", "softmax", "bpr", "in_batch_softmax"]
MetricsName: TypeAlias = Literal["bce", "mse", "softmax"]

_NAMES = get_args(LossName)
_WORD = "[A-Za-z_][A-Za-z0-9_]*"
_LOSS = rf"^({'|'.join(_NAMES)}|{_WORD}(\.{_WORD})*:{_WORD})$"


class NegativesConfig(StrictModel):
    """Items that are drawn as negatives of a sample's item, anew in each epoch."""

    kind: Literal["uniform", "popularity", "in_batch"] = Field(
        description="uniform: every item alike. popularity: as often as it is in the training files. in_batch: the "
        "items of a worker's step. Items are the lines of the feature's vocabulary, or the keys in the training files."
    )
    per_positive: int = Field(ge=1, le=65536, description="Negatives of a sample.")


class TaskConfig(StrictModel):
    """One output of the model: its label, its loss, and what the loss counts in the sum."""

    label: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="The label; null: the label of the task's name, or the only label."
    )
    loss: str = Field(
        "bce",
        pattern=_LOSS,
        description="bce: binary cross entropy of logits. mse: squared error. softmax, bpr: of candidates, whose "
        "positive is the label. in_batch_softmax: of a matrix of scores, whose diagonal has the positives. "
        "MODULE:FUNCTION: a function (scores, labels) of one's own, which returns a loss for each sample "
        "([its contract](own-models.md#a-loss-of-ones-own)).",
        json_schema_extra={"allowed": f"{', '.join(_NAMES)}, or MODULE:FUNCTION"},
    )
    metrics: MetricsName | None = Field(
        None,
        description="With a loss of one's own, the loss whose outputs, labels and metrics the task has: bce: logits of "
        "a binary label. mse: numbers. softmax: a score for each candidate. null: those of its loss.",
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="Factor of the loss in the sum of all tasks.")
    item: Annotated[str | None, Field(min_length=1)] = Field(
        None,
        description="Feature with the key of a sample's item, for in_batch_softmax: the loss corrects for how often an "
        "item is in a batch (logQ), and samples of one item are no negatives of each other; null: neither. For "
        "negatives: the positive.",
    )
    negatives: NegativesConfig | None = Field(
        None,
        description="Negatives for softmax and bpr: the feature of item becomes a list of candidates, the sample's own "
        "item first, and the label the reward of the sample, at least 0. null: the data have candidates.",
        json_schema_extra={"allowed": "a section with kind and per_positive"},
    )


@dataclass(frozen=True)
class Task:
    """An output of the model, its label and its loss.

    Attributes:
        name: the name of the task.
        label: the name of the label.
        loss: the name of the loss, or MODULE:FUNCTION of the user's own.
        weight: the factor of the loss.
        item: the feature with the key of a sample's item; None: the loss does not ask for it.
        negatives: how negatives of the item are drawn; None: none are.
        metrics: the metrics that judge a task with a loss of the user's own; None: those of its loss.
    """

    name: str
    label: str
    loss: str = "bce"
    weight: float = 1.0
    item: str | None = None
    negatives: NegativesConfig | None = None
    metrics: MetricsName | None = None

    @property
    def candidates(self) -> int | None:
        """The number of candidates of a sample; None: the data or the batch decide."""
        return None if self.negatives is None else self.negatives.per_positive + 1

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is a function of the user's own."""
        return ":" in self.loss

    @property
    def judged_as(self) -> MetricsName:
        """The loss whose metrics judge the task, and whose outputs it has; softmax stands for all over candidates."""
        if self.metrics is not None:
            return self.metrics
        return "bce" if self.loss == "bce" else "mse" if self.loss == "mse" else "softmax"
