"""Loads the exported program of a published version; torch knows the operators of lookups afterwards."""

from __future__ import annotations

import io

import torch
from torch.export import ExportedProgram

from ...cpp_ext.torch_ops import is_operator
from ...proto.errors import DataLoss
from ...proto.published.program import read_program
from ...proto.security.security import Security


def load_program(root: str, name: str, version: int, security: Security | None = None) -> bytes:
    """The exported program of a version, as ``torch.export.load`` takes it from a file: nothing in it is pickled.

    The operators of lookups are registered with torch as well, without which it could not read the program.

    Args:
        root: folder of published models, by path or URL.
        name: of the model.
        version: its number.
        security: names the keys of trusted publishers; None: the process's.

    Raises:
        NotFound: there is no such version, or it has rows alone.
        DataLoss: it is damaged, or says what a program may not.
        FailedPrecondition: there is a verification key, and the program is not signed by its publisher.
    """
    return read_program(root, name, version, security, is_operator=is_operator)


def load_exported(root: str, name: str, version: int, security: Security | None = None) -> ExportedProgram:
    """As :func:`load_program`, as a program of torch."""
    data = load_program(root, name, version, security)
    try:
        return torch.export.load(io.BytesIO(data))
    except Exception as error:  # torch has errors of many kinds for what it cannot read
        raise DataLoss(f"{name}@{version}: torch cannot read its program: {type(error).__name__}: {error}") from error
