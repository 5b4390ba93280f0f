"""A model that takes keyword arguments, as a module that takes them by position, which a served program does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn


class _ByPosition(nn.Module):
    """Calls a model with keyword arguments, given its arguments by position.

    Args:
        model: the model.
    """

    names: tuple[str, ...]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def by_position(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Returns a module whose positional arguments are keyword arguments of the model.

    ``torch.export`` counts the arguments in the signature of ``forward``, and takes ``*tensors`` for one. So the module
    has a class of its own, whose ``forward`` has these names in its signature.

    Args:
        model: the model.
        names: the names of its arguments, in the order of the positions.
    """

    def forward(self: _ByPosition, *tensors: Any) -> Any:
        return self.model(**dict(zip(self.names, tensors, strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    made = type("ByPosition", (_ByPosition,), {"forward": forward, "names": tuple(names)})(model)
    assert isinstance(made, nn.Module)
    return made
