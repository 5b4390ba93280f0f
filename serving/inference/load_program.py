"""Loads the exported program of a published version. Importing it registers the operators of lookups with torch."""

from __future__ import annotations

import io

import torch
from torch.export import ExportedProgram

from ...cpp_ext.torch_ops import is_operator
from ...proto.errors import DataLoss
from ...proto.published.program import read_program
from ...proto.security.security import Security


def load_program(root: str, name: str, version: int, security: Security | None = None) -> bytes:
    """Returns the exported program of a version as the bytes of a file for ``torch.export.load``.

    No object in the file is pickled. The operators of lookups are registered with torch, which needs them to read the
    program.

    Args:
        root: the folder of published models, by path or URL.
        name: the name of the model.
        version: the number of the version.
        security: names the keys of trusted publishers; None: the settings of this process.

    Raises:
        NotFound: there is no such version, or it has no program.
        DataLoss: the program is damaged, or has contents that a program must not have.
        FailedPrecondition: there are verification keys, and no trusted publisher signed the program.
    """
    return read_program(root, name, version, security, is_operator=is_operator)


def load_exported(root: str, name: str, version: int, security: Security | None = None) -> ExportedProgram:
    """Returns the exported program of a version as an object of torch; see :func:`load_program`."""
    data = load_program(root, name, version, security)
    try:
        return torch.export.load(io.BytesIO(data))
    except Exception as error:  # torch has errors of many kinds for what it cannot read
        raise DataLoss(f"{name}@{version}: torch cannot read its program: {type(error).__name__}: {error}") from error
