"""The section ``tasks`` of a job file: what each output of the model is trained for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from ..options.strict_model import StrictModel

LossName: TypeAlias = Literal["bce", "mse", "softmax", "bpr", "in_batch_softmax"]


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
    loss: LossName = Field(
        "bce",
        description="bce: binary cross entropy of logits. mse: squared error. softmax, bpr: of candidates, whose "
        "positive is the label. in_batch_softmax: of a matrix of scores, whose diagonal has the positives.",
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
        loss: the name of the loss.
        weight: the factor of the loss.
        item: the feature with the key of a sample's item; None: the loss does not ask for it.
        negatives: how negatives of the item are drawn; None: none are.
    """

    name: str
    label: str
    loss: LossName = "bce"
    weight: float = 1.0
    item: str | None = None
    negatives: NegativesConfig | None = None

    @property
    def candidates(self) -> int | None:
        """The number of candidates of a sample; None: the data or the batch decide."""
        return None if self.negatives is None else self.negatives.per_positive + 1
