"""Warns of a loop that calls ``session.step()`` without its dense optimizer, so that dense weights never train. An
optimizer of another model is none.

A loop may also step its optimizer itself, after several calls of ``session.step()``, or move weights by hand. So the
warning waits for the eighth such step. It is issued when a weight with a gradient has not moved by then, and no
optimizer has stepped.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_LOOKS = 8  # the steps that are looked at; later ones cost nothing


class ForgottenOptimizer:
    """Watches the steps of one session that were given no dense optimizer."""

    def __init__(self) -> None:
        self._looks_left = _LOOKS
        self._suspect: tuple[str, weakref.ref[Tensor], Tensor] | None = None

    def end(self) -> None:
        """Ends the watch, as an optimizer of the dense side is known."""
        self._looks_left, self._suspect = 0, None

    @property
    def is_looking(self) -> bool:
        """Whether a further step is looked at."""
        return self._looks_left > 0

    def look(self, models: Iterable[nn.Module], *, is_given: bool, stacklevel: int) -> None:
        """Looks at a step without the models' dense optimizer, before its gradients go; it warns at most once.

        Args:
            models: the models that were distributed over the session.
            is_given: whether an optimizer was given, which has no weight of these models.
            stacklevel: the frame that the warning names; 1 is the caller of this method.
        """
        if self._looks_left == 0:
            return
        self._looks_left -= 1
        if self._suspect is None:
            self._suspect = _with_gradient(models)
            return
        name, reference, before = self._suspect
        weight = reference()
        if weight is None or weight.device != before.device or not torch.equal(weight, before):
            self.end()
            return
        if self._looks_left > 0 or weight.grad is None:
            return
        self.end()
        why = "the one that was given has no weight of this model" if is_given else "no dense optimizer was given"
        warnings.warn(
            f"session.step: {name!r} has a gradient, and no step has moved it, as {why}; call session.step(dense), or "
            "set requires_grad to False where only rows are trained",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def _with_gradient(models: Iterable[nn.Module]) -> tuple[str, weakref.ref[Tensor], Tensor] | None:
    """Returns the name, a weak reference and a copy of the smallest weight whose gradient is not zero."""
    named = [each for model in models for each in model.named_parameters() if _is_plain(each[1])]
    for name, weight in sorted(named, key=lambda each: each[1].numel()):
        if weight.grad is not None and bool(weight.grad.count_nonzero()):
            return name, weakref.ref(weight), weight.detach().clone()
    return None


def _is_plain(weight: Tensor) -> bool:
    """Whether the weight is whole, and in memory: neither in parts over ranks, nor on the meta device, nor empty."""
    grad = weight.grad
    return (
        grad is not None
        and not (hasattr(weight, "to_local") or weight.is_meta or grad.is_sparse)
        and weight.numel() == grad.numel() > 0
    )
