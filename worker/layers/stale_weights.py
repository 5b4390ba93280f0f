"""Finds references to the weights of layers whose rows have moved to the servers.

Such a weight is stale from then on and keeps its memory. What reads it by value cannot be seen; what asks for its
gradient, a list of weights to regularise, say, meets an error.
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

_DEPTH = 8  # containers between a weight and what is named as its holder
_MOST_NAMES = 3
_WIDEST = 10_000  # objects that are looked at on one level
_REMEDY = (
    "for L2 of rows give the tables' optimizer weight_decay, sr.Adagrad(lr=0.05, weight_decay=1e-5), and leave these "
    "weights out of what is regularised; make optimizers after distribute"
)


@dataclass(frozen=True)
class SwappedWeight:
    """The weight of a layer that was swapped; not kept alive."""

    path: str
    weight: weakref.ref[Tensor]


def swapped_weight(path: str, layer: nn.Module) -> SwappedWeight:
    """Has gradients of the layer's weight refused from now on."""
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
    """Warns once of all weights that something holds still; ``stacklevel``: 1 is the caller of this function."""
    left = [one for one in swapped if one.weight() is not None]
    if left:
        gc.collect()  # objects that only hold each other are gone now
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
    """Names of what refers to tensors: optimizers, attributes of modules, variables of Python modules; some of them."""
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
    """What a holder is called; None for a container, whose own holder is to be named."""
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
