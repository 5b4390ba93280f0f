"""The arguments that a published program takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...proto.errors import InvalidArgument, SparserowError, typed_error

_DTYPE_OF_IDS = "ids.dtype"  # an operator's refusal, which cannot name the program's argument
_REFUSALS_OF_TORCH = (
    "Expected input at ",
    "Guard failed: ",
    "Trying to flatten user inputs",
    "Unexpected number of dimensions in input",
)


@dataclass(frozen=True)
class ProgramInput:
    """An argument of a program.

    Attributes:
        name: the name of the argument.
        dtype: its dtype.
        shape: its shape; None is a dimension that varies.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]


def inputs_of(program: torch.export.ExportedProgram) -> tuple[ProgramInput, ...]:
    """Returns the arguments of a program, in order."""
    names = program.graph_signature.user_inputs
    return tuple(
        ProgramInput(str(names[at]), value.dtype, tuple(d if isinstance(d, int) else None for d in value.shape))
        for at, value in _tensors_of(program).items()
    )


def _tensors_of(program: torch.export.ExportedProgram) -> dict[int, torch.Tensor]:
    """Returns the tensors among a program's arguments, by their place."""
    placeholders = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return {
        at: value
        for at, name in enumerate(program.graph_signature.user_inputs)
        if isinstance(name, str) and isinstance(value := placeholders[name], torch.Tensor)
    }


def error_of_call(program: torch.export.ExportedProgram, arguments: tuple[Any, ...], error: Exception) -> Exception:
    """Returns the error for a call that failed: InvalidArgument where the arguments are not those that a program takes.

    Args:
        program: the program that was called.
        arguments: the arguments of the call.
        error: what the call raised.
    """
    typed = typed_error(error)
    if isinstance(typed, SparserowError) and not str(typed).startswith(_DTYPE_OF_IDS):
        return typed
    takes = _Takes(program)
    problem = takes.problem(arguments)
    if problem is None and str(error).startswith(_REFUSALS_OF_TORCH):
        problem = f"the arguments do not fit ({str(error).splitlines()[0]})"
    return typed if problem is None else InvalidArgument(f"ServedModel: {problem}; the program takes {takes}")


class _Takes:
    """What a program takes, for people: dimensions that vary have the names n, n2 and so on."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        structure = program.call_spec.in_spec
        self._places: tuple[Any, ...] = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)[0]
        self._names = [str(name) for name in program.graph_signature.user_inputs]
        self._tensors = _tensors_of(program)
        self._letters: dict[str, str] = {}

    def __str__(self) -> str:
        return ", ".join(
            f"{self._names[at]}: {_dtype(tensor)} ({', '.join(map(str, self._dims(tensor)))})"
            for at, tensor in self._tensors.items()
        )

    def problem(self, arguments: tuple[Any, ...]) -> str | None:
        """Returns what is wrong with the arguments of a call; None: nothing that can be seen here."""
        if len(arguments) != len(self._places):
            return f"the number of arguments is {len(arguments)}, and {len(self._places)} is allowed"
        for place, argument in zip(self._places, arguments, strict=True):
            if pytree.tree_structure(place) != pytree.tree_structure(argument):
                names = ", ".join(self._names[at] for at in pytree.tree_leaves(place))
                return f"{names} is of type {type(argument).__name__}"
        leaves = pytree.tree_leaves(arguments)
        found = [(at, leaves[at]) for at in self._tensors]
        sizes: dict[int | str, int] = {}
        for at, value in found:
            if problem := self._problem_of_shape(at, value, sizes):
                return problem
        found.sort(key=lambda each: _is_integer(each[1]))  # integers of another size may be right, as ids are
        return next((problem for at, value in found if (problem := self._problem_of_dtype(at, value))), None)

    def _problem_of_shape(self, at: int, value: Any, sizes: dict[int | str, int]) -> str | None:
        """Returns what is wrong with one argument; ``sizes`` has the sizes of the dimensions before it by name."""
        if not isinstance(value, torch.Tensor):
            return f"{self._names[at]} is of type {type(value).__name__}, which is no tensor"
        dims = self._dims(self._tensors[at])
        fits = len(dims) == value.dim() and all(
            size == (dim if isinstance(dim, int) else sizes.setdefault(dim, size))
            for dim, size in zip(dims, value.shape, strict=True)
        )
        known = ", ".join(f"{dim} is {size}" for dim, size in sizes.items() if dim in dims)
        where = f" where {known}" if known and len(dims) == value.dim() else ""
        return None if fits else f"{self._names[at]} has the shape {tuple(value.shape)}{where}"

    def _problem_of_dtype(self, at: int, value: torch.Tensor) -> str | None:
        if value.dtype == self._tensors[at].dtype:
            return None
        return f"{self._names[at]} has the dtype {_dtype(value)}"

    def _dims(self, tensor: torch.Tensor) -> list[int | str]:
        return [dim if isinstance(dim, int) else self._letter(str(dim)) for dim in tensor.shape]

    def _letter(self, symbol: str) -> str:
        count = len(self._letters) + 1
        return self._letters.setdefault(symbol, "n" if count == 1 else f"n{count}")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()
