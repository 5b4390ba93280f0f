"""Reads and makes Ed25519 keys in PEM, as the security file names them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_PUBLIC = re.compile(r"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)


def signing_key(text: str) -> Ed25519PrivateKey:
    """Returns the private key of a text in PEM.

    Raises:
        InvalidArgument: the text has no private key, or a key of another kind.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(text.encode(), None)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"signing_key: the file is not a private key in PEM without a passphrase: {error}"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidArgument("signing_key: the file is not an Ed25519 key; `sparserow security signing-key` makes one")
    return key


def verification_keys(text: str) -> list[Ed25519PublicKey]:
    """Returns the public keys of a text in PEM; there are several while a publisher changes its key.

    Raises:
        InvalidArgument: the text has no public key, or a key of another kind.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    keys = []
    try:
        for block in _PUBLIC.findall(text):
            keys.append(load_pem_public_key(block.encode()))
    except ValueError as error:
        raise InvalidArgument(f"verification_key: the file is not a public key in PEM: {error}") from None
    if not keys or not all(isinstance(key, Ed25519PublicKey) for key in keys):
        raise InvalidArgument("verification_key: allowed: Ed25519 public keys in PEM, one or more")
    return [key for key in keys if isinstance(key, Ed25519PublicKey)]


def make_key_pair() -> tuple[str, str]:
    """Returns a new private key and its public key, both in PEM."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private.decode(), public.decode()
