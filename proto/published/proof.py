"""Signs the manifests of versions and of later dense weights, and checks the signatures.

A proof has the SHA-256 of each field of a manifest, so that an error can name the field that was changed, and an
Ed25519 signature over these. The fields name files with their SHA-256. So the signature covers the files as well.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..checkpoint.folder import Piece, bytes_of
from ..documents import Text
from ..errors import FailedPrecondition
from ..security.security import Security, loaded_security, process_security
from ..security.signing_keys import signing_key, verification_keys

Kind: TypeAlias = Literal["version", "dense weights"]


@dataclass(frozen=True)
class Proof:
    """The proof of a manifest.

    Attributes:
        sha256: the SHA-256 of each signed field, in hexadecimal digits, by the field's name.
        signature: the Ed25519 signature over ``sha256`` in base64.
    """

    sha256: dict[Text, Text]
    signature: Text


def sha256_of(pieces: Iterable[Piece]) -> str:
    """Returns the SHA-256 of a file's contents, given one after another, in hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(bytes_of(piece))
    return digest.hexdigest()


def trusted_keys(security: Security | None) -> Security:
    """Returns the security file that names the keys of publishers.

    That is the client's own file where it names keys. Otherwise it is the file of the process, because a client's file
    may name only certificates and a token.
    """
    own = loaded_security(security)
    return own if own.verification_key else process_security()


def make_proof(kind: Kind, fields: Mapping[str, Any], security: Security) -> Proof | None:
    """Returns the proof of a manifest that is being published; None when the security file names no signing key.

    Args:
        kind: the kind of the manifest; a signature of one kind is none of another.
        fields: the fields to sign by name, as values of JSON; the field ``proof`` is none of them.
        security: the security file of the publisher.
    """
    if not security.signing_key:
        return None
    sha256 = _sha256_of_fields(fields)
    signature = signing_key(security.signing_key).sign(_message(kind, sha256))
    return Proof(sha256, base64.b64encode(signature).decode())


def check_proof(kind: Kind, fields: Mapping[str, Any], proof: Proof | None, security: Security, where: str) -> None:
    """Checks a manifest against its proof; without a verification key nothing is checked.

    Args:
        kind: the kind of the manifest.
        fields: the fields as for :func:`make_proof`.
        proof: the proof of the manifest; None when there is none.
        security: names the keys of trusted publishers.
        where: the name of the manifest's file, which begins an error message.

    Raises:
        FailedPrecondition: the manifest has no signature by a trusted publisher, or a field is not what was signed; the
            text names the field.
    """
    if not security.verification_key:
        return
    if proof is None:
        raise FailedPrecondition(
            f"{where}: the file is not signed, and {security.path} names a verification_key; publish with a signing_key"
        )
    if not _is_signed(_message(kind, proof.sha256), proof.signature, security):
        raise FailedPrecondition(f"{where}: proof: no key of verification_key in {security.path} has signed it")
    found = _sha256_of_fields(fields)
    changed = next((name for name in {**proof.sha256, **found} if proof.sha256.get(name) != found.get(name)), None)
    if changed is not None:
        raise FailedPrecondition(f"{where}: {changed[:200]}: is not what the publisher of the {kind} has signed")


def _is_signed(message: bytes, signature: str, security: Security) -> bool:
    from cryptography.exceptions import InvalidSignature

    for key in verification_keys(security.verification_key):
        try:
            key.verify(base64.b64decode(signature, validate=True), message)
        except (InvalidSignature, ValueError):
            continue
        return True
    return False


def _sha256_of_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: sha256_of([_canonical(value)]) for name, value in fields.items() if name != "proof"}


def _message(kind: Kind, sha256: Mapping[str, str]) -> bytes:
    return f"sparserow {kind} 1\n".encode() + _canonical(sha256)


def _canonical(value: Any) -> bytes:
    """Returns the one text of JSON that a value has."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
