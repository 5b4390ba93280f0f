"""Proofs of programs and of later dense weights: their SHA-256, and an Ed25519 signature over the name under which they
may be loaded.
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
    """What is said of a program, or of dense weights, beside their size.

    Attributes:
        sha256: of the file, in hexadecimal digits.
        signature: Ed25519 in base64; empty: the publisher had no key.
    """

    sha256: str
    signature: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.sha256, str) or not isinstance(self.signature, str):
            raise TypeError("program_proof: sha256 and signature must be strings")


def make_proof(model: str, version: int, facts: FileFacts, pieces: Sequence[Any], security: Security) -> ProgramProof:
    """The proof of a file that is being published, signed where the security file names a signing key.

    Args:
        model, version: that the file belongs to.
        facts: the file's name below the version's folder, and its size.
        pieces: its bytes, in order.
        security: of the publisher.
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
    """Whether the file is signed by a publisher that is trusted here.

    Raises:
        DataLoss: the bytes are not those that were published.
        FailedPrecondition: the security file names a verification key, and no signature of its publisher is there.
    """
    if proof is not None and hashlib.sha256(data).hexdigest() != proof.sha256:
        raise DataLoss(f"{where}: fails its SHA-256")
    if not security.verification_key:
        return False
    if proof is None or not proof.signature:
        raise FailedPrecondition(
            f"{where}: is not signed, and {security.path} names a verification_key; publish it with a signing_key"
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
        f"{where}: its signature as {model}@{version} is by no key of verification_key in {security.path}"
    )


def _message(model: str, version: int, facts: FileFacts, sha256: str) -> bytes:
    """What is signed: a file cannot take the name of another model, version or file."""
    signed = {"model": model, "version": version, "file": facts.file, "bytes": facts.bytes, "sha256": sha256}
    return _CONTEXT + json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
