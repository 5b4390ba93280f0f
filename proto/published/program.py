"""Reads the exported program of a published version, with every check that an untrusted file needs."""

from __future__ import annotations

import functools
import logging

from ..errors import NotFound
from ..security.security import Security, loaded_security, process_security
from .program_archive import confined
from .program_code import IsOperator
from .program_proof import check_proof
from .registry import ModelRegistry
from .row_parts import read_file

log = logging.getLogger(__name__)


def trusted_keys(security: Security | None) -> Security:
    """Returns the security file that names the keys of publishers.

    That is the client's own file where it names keys. Otherwise it is the file of the process, because a client's file
    may name only certificates and a token.
    """
    own = loaded_security(security)
    return own if own.verification_key else process_security()


def read_program(
    root: str, name: str, version: int, security: Security | None = None, *, is_operator: IsOperator
) -> bytes:
    """Returns the exported program of a version as bytes for ``torch.export.load``; nothing in it is pickled.

    Args:
        root: the folder of published models, by path or URL.
        name, version: the name of the model and the number of the version.
        security: names the keys of trusted publishers; None stands for the security file of the process.
        is_operator: tells whether torch has an operator of a given namespace, name and overload.

    Raises:
        NotFound: there is no such version, or it has rows alone.
        DataLoss: the program is damaged, or contains something that is not allowed in a program.
        FailedPrecondition: there is a verification key, and the program has no signature by its publisher.
    """
    security = trusted_keys(security)
    registry = ModelRegistry(root)
    manifest = registry.manifest(name, version)
    if manifest.program is None:
        raise NotFound(
            f"{name}@{version}: the version was published without a program; it has rows alone, which `sparserow "
            "query` looks up; to score, publish the model too: a section publish in its job file, or sr.publish with "
            "model= and example="
        )
    folder = registry.folder(name, version)
    where = f"{folder.url}/{manifest.program.file}"
    data = bytes(read_file(folder, manifest.program))
    is_signed = check_proof(manifest.proof, name, version, manifest.program, data, security, where)
    if not is_signed:
        _warn_once()
    return confined(data, where, is_signed=is_signed, is_operator=is_operator)


@functools.cache
def _warn_once() -> None:
    log.warning(
        "programs of unknown publishers are loaded, so a process that can write to the registry can run code here; "
        "name a verification_key in the security file"
    )
