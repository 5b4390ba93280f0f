"""The model of a job as it is exported for serving: its arguments by position, an example of them, its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...proto.errors import InvalidArgument, not_allowed
from ..data import NamedBatch
from ..metrics.losses import undo_downsampling_of_logits
from ..publish.by_position import by_position
from ..publish.featured_program import shapes_of
from ..publish.program_export import ProgramSource

_SAMPLES = 64  # of an example for a model whose lists have any length


class CorrectedLogits(nn.Module):
    """Corrects the logits of a model for the negatives that its training left out (He et al. 2014, section 6.3).

    Args:
        model: the model, whose output is a tensor of logits, or a mapping with one.
        keep: the share of negatives that were kept.
    """

    def __init__(self, model: nn.Module, keep: float) -> None:
        super().__init__()
        self.model = model
        self.keep = keep

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Returns the corrected logits; the arguments are those of the model."""
        out = self.model(*arguments, **named)
        if isinstance(out, Mapping):
            return {name: undo_downsampling_of_logits(each, self.keep) for name, each in out.items()}
        return undo_downsampling_of_logits(out, self.keep)


def exported(model: nn.Module, batches: Iterable[NamedBatch], *, negatives_keep: float = 1.0) -> ProgramSource:
    """Returns a trained model to export: itself, or what its method ``for_serving`` returns.

    Args:
        model: the model.
        batches: test batches, the first of which give the example.
        negatives_keep: the share of negatives that training kept.

    Raises:
        InvalidArgument: no batch has enough samples, or keys of each list; or ``for_serving`` returns no module.
    """
    served = getattr(model, "for_serving", None)
    if callable(served):
        model = served()
        if not isinstance(model, nn.Module):
            raise not_allowed("model.class: what for_serving returns", type(model).__name__, "an nn.Module")
    model = model if negatives_keep == 1 else CorrectedLogits(model, negatives_keep)
    for batch in batches:
        example = batch.example(_SAMPLES) or batch.example(len(batch))
        if example is not None:
            names = tuple(example.tensors)
            arguments = tuple(example.tensors[name] for name in names)
            return ProgramSource(by_position(model, names), arguments, shapes_of(names, example.tensors))
    raise InvalidArgument(
        "publish: the test files have too few good samples for an example: 2 samples of one batch, with 2 keys of each "
        "list feature, are needed"
    )
