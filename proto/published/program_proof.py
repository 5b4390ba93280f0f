"""Makes and checks the proofs of programs and of later dense weights.

A proof is the SHA-256 of the file, and an Ed25519 signature over it and the name under which the file may be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint.manifest import FileFacts
from ..errors import DataLoss, FailedPrecondition
from ..security.signing_keys import signing_key, verification_keys

if TYPE_CHECKING:
    from ..security.security import Security

_CONTEXT = b"sparserow program 1\n"


@dataclass(frozen=True)
class ProgramProof:
    """The proof of a program or of dense weights.

    Attributes:
        sha256: the SHA-256 of the file, in hexadecimal digits.
        signature: the Ed25519 signature in base64; empty when the publisher had no key.
    """

    sha256: str
    signature: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.sha256, str) or not isinstance(self.signature, str):
            raise TypeError("program_proof: sha256 and signature must be strings")


def make_proof(model: str, version: int, facts: FileFacts, pieces: Sequence[Any], security: Security) -> ProgramProof:
    """Returns the proof of a file that is being published, signed when the security file names a signing key.

    Args:
        model, version: the version that the file belongs to.
        facts: the file's name below the version's folder, and its size.
        pieces: the bytes of the file, in order.
        security: the security file of the publisher.
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    sha256 = digest.hexdigest()
    if not security.signing_key:
        return ProgramProof(sha256)
    signature = signing_key(security.signing_key).sign(_message(model, version, facts, sha256))
    return ProgramProof(sha256, base64.b64encode(signature).decode())


def check_proof(
    proof: ProgramProof | None,
    model: str,
    version: int,
    facts: FileFacts,
    data: bytes | memoryview,
    security: Security,
    where: str,
) -> bool:
    """Checks a file against its proof.

    Args:
        proof: the proof of the file; None when there is none.
        model, version: the version that the file belongs to.
        facts: the file's name below the version's folder, and its size.
        data: the bytes of the file.
        security: names the keys of trusted publishers.
        where: the name of the file, which begins an error message.

    Returns:
        Whether a trusted publisher signed the file.

    Raises:
        DataLoss: the bytes are not those that were published.
        FailedPrecondition: the security file names a verification key, and the file has no signature by its publisher.
    """
    if proof is not None and hashlib.sha256(data).hexdigest() != proof.sha256:
        raise DataLoss(f"{where}: the file does not match its SHA-256")
    if not security.verification_key:
        return False
    if proof is None or not proof.signature:
        raise FailedPrecondition(
            f"{where}: the file is not signed, and {security.path} names a verification_key; publish it with a "
            f"signing_key"
        )
    from cryptography.exceptions import InvalidSignature

    message = _message(model, version, facts, proof.sha256)
    for key in verification_keys(security.verification_key):
        try:
            key.verify(base64.b64decode(proof.signature, validate=True), message)
        except (InvalidSignature, ValueError):
            continue
        return True
    raise FailedPrecondition(
        f"{where}: no key of verification_key in {security.path} has signed the file as {model}@{version}"
    )


def _message(model: str, version: int, facts: FileFacts, sha256: str) -> bytes:
    """Returns the signed text, which ties the file to its model, version and name."""
    signed = {"model": model, "version": version, "file": facts.file, "bytes": facts.bytes, "sha256": sha256}
    return _CONTEXT + json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
