"""Exports a model whose arguments are features: its example is made of columns, and lists may have any length."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...proto.errors import InvalidArgument
from ...proto.features.document import files_of
from .by_position import by_position
from .program_export import ProgramSource

if TYPE_CHECKING:
    import torch

    from ...proto.features.cells import Columns
    from ..data.feature_tensors import Features


def featured_source(
    model: torch.nn.Module, features: Features, example: Columns
) -> tuple[ProgramSource, dict[str, bytes]]:
    """Returns the model to export, and the files of its features by name.

    Args:
        model: the model; the arguments of its ``forward`` are the names of the features.
        features: the features.
        example: columns of two rows or more.

    Raises:
        InvalidArgument: an argument is no feature, a feature is no argument, or the example has too few rows or keys.
    """
    from ..session.compiled_module import bare

    model = bare(model)  # as the signature of a compiled forward has no names
    arguments = arguments_of(model, tuple(feature.name for feature in features.set.features))
    tensors = features(example)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(model.forward).parameters.values())
    exported = by_position(model, arguments) if takes_any else model
    source = ProgramSource(exported, tuple(tensors[name] for name in arguments), shapes_of(arguments, tensors))
    return source, files_of(features.set, arguments)


def arguments_of(model: torch.nn.Module, features: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the arguments of a model's forward, in order; one with ``**tensors`` takes all features.

    Args:
        model: the model.
        features: the names of the features.

    Raises:
        InvalidArgument: an argument is no feature, or a feature is no argument.
    """
    arguments = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments += [feature for feature in features if feature not in arguments]
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidArgument(f"publish.features: forward has {parameter}; allowed: an argument for each feature")
        if name in features:
            arguments.append(name)
        elif parameter.default is parameter.empty:
            raise InvalidArgument(
                f"publish.features: the argument {name!r} of forward is no feature; features: {', '.join(features)}"
            )
    absent = [name for name in features if name not in arguments]
    if absent:
        raise InvalidArgument(
            f"publish.features: forward has no argument {absent[0]!r}; its arguments: {', '.join(arguments) or 'none'}"
        )
    return tuple(arguments)


def shapes_of(arguments: Sequence[str], tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the dimensions that vary for each argument: the rows, and for each list feature its keys.

    Args:
        arguments: the names of the arguments.
        tensors: example tensors by name.

    Raises:
        InvalidArgument: the example has too few rows or keys.
    """
    from torch.export import Dim

    rows = Dim("rows", min=1)
    shapes: list[Any] = []
    for name in arguments:
        value = tensors[name]
        if not isinstance(value, tuple):
            _check_example(name, len(value), "rows")
            shapes.append({0: rows})
            continue
        values, offsets, *weights = value
        _check_example(name, len(offsets) - 1, "rows")
        _check_example(name, len(values), "keys")
        keys = Dim(f"{name}_keys", min=0)
        shapes.append(({0: keys}, {0: rows + 1}, *({0: keys} for _ in weights)))
    return tuple(shapes)


def _check_example(name: str, count: int, what: str) -> None:
    if count < 2:
        raise InvalidArgument(
            f"publish.example: feature {name!r} has {count} {what}; at least 2 are needed, as torch.export takes 0 and "
            "1 for constants"
        )
