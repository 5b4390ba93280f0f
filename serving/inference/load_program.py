"""Loads the exported program of a published version. Importing it registers the operators of lookups with torch."""

from __future__ import annotations

import io

import torch
from torch.export import ExportedProgram

from ...cpp_ext.torch_ops import is_operator
from ...proto.checkpoint.folder import Folder
from ...proto.errors import DataLoss
from ...proto.published.manifest import ModelManifest
from ...proto.published.program import read_program
from ...proto.published.proof import trusted_keys
from ...proto.published.registry import ModelRegistry
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
        FailedPrecondition: there are verification keys, and no trusted publisher signed the version as it is.
    """
    registry, keys = ModelRegistry(root), trusted_keys(security)
    manifest = registry.trusted_manifest(name, version, keys)
    return read_program(registry.folder(name, version), manifest, keys, is_operator=is_operator)


def exported_program(folder: Folder, manifest: ModelManifest, security: Security) -> ExportedProgram:
    """Returns the exported program of a version as an object of torch; see :func:`load_program`.

    Args:
        folder: the folder of the version.
        manifest: its manifest, as ``ModelRegistry.trusted_manifest`` returned it for ``security``.
        security: names the keys of trusted publishers.
    """
    data = read_program(folder, manifest, security, is_operator=is_operator)
    try:
        return torch.export.load(io.BytesIO(data))
    except Exception as error:  # torch has errors of many kinds for what it cannot read
        where = f"{manifest.model}@{manifest.version}"
        raise DataLoss(f"{where}: torch cannot read its program: {type(error).__name__}: {error}") from error
