"""Finds references to the weights of layers whose rows have moved to the servers.

Such a weight is stale from then on, and a reference keeps its memory. Code that reads the weight's values cannot be
detected. Code that computes a gradient of it, such as a regulariser over a list of weights, gets an error.
"""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...proto.errors import FailedPrecondition

_DEPTH = 8  # the most containers between a weight and the holder that is named
_MOST_NAMES = 3
_WIDEST = 10_000  # the most objects that are searched on one level
_REMEDY = (
    "for L2 of rows give the tables' optimizer weight_decay, sr.optim.Adagrad(lr=0.05, weight_decay=1e-5), and leave "
    "these weights out of the list that is regularised; make optimizers after distribute"
)


@dataclass(frozen=True)
class SwappedWeight:
    """The weight of a layer that was swapped, referenced weakly.

    Attributes:
        path: the path of the layer in the model.
        weight: a weak reference to the weight.
    """

    path: str
    weight: weakref.ref[Tensor]


def swapped_weight(path: str, layer: nn.Module) -> SwappedWeight:
    """Makes gradients of the layer's weight an error from now on, and returns a weak reference to the weight."""
    weight = layer.weight
    assert isinstance(weight, Tensor)

    def refuse(gradient: Tensor) -> NoReturn:
        del gradient
        raise FailedPrecondition(
            f"layer {path!r}: a gradient reached the weight that distribute replaced; its rows are on the servers, and "
            f"this copy is stale: {_REMEDY}"
        )

    weight.register_hook(refuse)
    return SwappedWeight(path, weakref.ref(weight))


def warn_of_stale_weights(swapped: Iterable[SwappedWeight], *, stacklevel: int) -> None:
    """Issues one warning about all swapped weights that are still referenced.

    Args:
        swapped: the weights of the swapped layers.
        stacklevel: the frame that the warning names; 1 is the caller of this function.
    """
    left = [one for one in swapped if one.weight() is not None]
    if left:
        gc.collect()  # frees objects that are referenced only by each other
        left = [one for one in left if one.weight() is not None]
    if not left:
        return
    weights = [weight for one in left if (weight := one.weight()) is not None]
    megabytes = sum(weight.numel() * weight.element_size() for weight in weights if not weight.is_meta) / 1e6
    names = ", ".join(repr(one.path) for one in left[:_MOST_NAMES]) + (", ..." if len(left) > _MOST_NAMES else "")
    holders = holders_of(weights)
    warnings.warn(
        f"distribute: the weights of {names} are still in memory ({megabytes:.1f} MB), by "
        f"{', '.join(holders) or 'a variable'}; their rows are on the servers, and these copies are stale: {_REMEDY}",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def holders_of(weights: list[Tensor]) -> list[str]:
    """Returns names of at most three holders of the tensors.

    A holder is an optimizer, an attribute of a module, or a variable of a Python module.
    """
    found: list[str] = []
    seen: dict[int, Any] = {id(weight): weight for weight in weights}
    ours = {id(seen), id(found), id(weights)}
    level: list[Any] = list(weights)
    for _ in range(_DEPTH):
        above: list[Any] = []
        ours.add(id(level))
        for holder in gc.get_referrers(*level):
            if id(holder) in seen or id(holder) in ours or isinstance(holder, types.FrameType):
                continue
            name = _name(holder, seen)
            if name is None:
                above.append(holder)
            elif name not in found:
                found.append(name)
        if len(found) >= _MOST_NAMES or not above or len(above) > _WIDEST:
            break
        seen.update((id(holder), holder) for holder in above)
        level = above
    return found[:_MOST_NAMES]


def _name(holder: Any, seen: dict[int, Any]) -> str | None:
    """Returns the name of a holder; None for a container, whose own holder is named instead."""
    if isinstance(holder, torch.optim.Optimizer):
        return f"an optimizer ({type(holder).__name__})"
    if isinstance(holder, nn.Module):
        attributes = (*holder._modules.items(), *vars(holder).items())
        keys = [key for key, value in attributes if id(value) in seen and not key.startswith("_")]
        return f"the attribute {keys[0]!r} of {type(holder).__name__}" if keys else None
    if isinstance(holder, dict) and isinstance(holder.get("__name__"), str) and "__builtins__" in holder:
        keys = [key for key, value in holder.items() if id(value) in seen]
        return f"the variable {keys[0]!r} of {holder['__name__']}" if keys else None
    return None
