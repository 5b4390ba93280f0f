"""The arguments that a published program takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    placeholders = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    names = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    return tuple(
        ProgramInput(name, value.dtype, tuple(d if isinstance(d, int) else None for d in value.shape))
        for name in names
        if isinstance(value := placeholders[name], torch.Tensor)
    )
