"""Reads the exported program of a published version: the bytes, after every check that a file of others needs."""

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
    """The security file that names publishers' keys: a client's own may name certificates and a token alone."""
    own = loaded_security(security)
    return own if own.verification_key else process_security()


def read_program(
    root: str, name: str, version: int, security: Security | None = None, *, is_operator: IsOperator
) -> bytes:
    """The exported program of a version, as ``torch.export.load`` takes it from a file: nothing in it is pickled.

    Args:
        root: folder of published models, by path or URL.
        name, version: of the model.
        security: names the keys of trusted publishers; None: the process's.
        is_operator: whether torch has an operator of that namespace, name and overload.

    Raises:
        NotFound: there is no such version, or it has rows alone.
        DataLoss: it is damaged, or says what a program may not.
        FailedPrecondition: there is a verification key, and the program is not signed by its publisher.
    """
    security = trusted_keys(security)
    registry = ModelRegistry(root)
    manifest = registry.manifest(name, version)
    if manifest.program is None:
        raise NotFound(
            f"{name}@{version}: was published without a program, with rows alone, which `sparserow query` looks up; "
            "to score, publish the model too: a section publish in its job file, or sr.publish with model= and example="
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
        "programs are loaded whose publisher is not known: a writer of the registry can run code here; "
        "name a verification_key in the security file"
    )
