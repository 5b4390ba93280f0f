"""Reads the exported program of a published version, with every check that an untrusted file needs."""

from __future__ import annotations

import functools
import logging

from ..checkpoint.folder import Folder
from ..errors import NotFound
from ..security.security import Security
from .manifest import ModelManifest
from .program_archive import confined
from .program_code import IsOperator
from .row_parts import read_file

log = logging.getLogger(__name__)


def read_program(folder: Folder, manifest: ModelManifest, security: Security, *, is_operator: IsOperator) -> bytes:
    """Returns the exported program of a version as bytes for ``torch.export.load``; nothing in it is pickled.

    Args:
        folder: the folder of the version.
        manifest: its manifest, as ``ModelRegistry.trusted_manifest`` returned it for ``security``.
        security: names the keys of trusted publishers.
        is_operator: says whether torch has an operator of a given namespace, name and overload.

    Raises:
        NotFound: the version has rows alone.
        DataLoss: the program is damaged, or contains something that is not allowed in a program.
    """
    if manifest.program is None:
        raise NotFound(
            f"{manifest.model}@{manifest.version}: the version was published without a program; it has rows alone, "
            "which `sparserow query` looks up; to score, publish the model too: a section publish in its job file, or "
            "session.publish with model= and example="
        )
    data = bytes(read_file(folder, manifest.program))
    is_signed = bool(security.verification_key)  # else the manifest was refused
    if not is_signed:
        _warn_once()
    return confined(data, f"{folder.url}/{manifest.program.file}", is_signed=is_signed, is_operator=is_operator)


@functools.cache
def _warn_once() -> None:
    log.warning(
        "programs of unknown publishers are loaded, so a process that can write to the registry can run code here; "
        "name a verification_key in the security file"
    )
