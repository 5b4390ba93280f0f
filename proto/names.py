"""Checks names of namespaces, tables and jobs, and makes their 32-bit ids (``id_of_name`` of cpp_ext/util/hash.h)."""

from __future__ import annotations

import xxhash

from .errors import not_allowed

FEATURES_TABLE = "features.json"  # of each namespace: what it keeps of features, as bytes in rows; no model reads it
NAME_FORM = "1-255 printable characters, no '/'"
FILE_NAME_FORM = "a plain file name: 1-255 bytes of printable characters, no '/', neither '.' nor '..'"


def check_name(owner: str, name: str) -> None:
    """Raises InvalidArgument unless ``name`` may name a namespace, a table or a job; ``owner`` begins the message."""
    if not name or len(name) > 255 or not name.isprintable() or "/" in name:
        raise not_allowed(owner, name, NAME_FORM)


def id_of_name(name: str) -> int:
    """Returns the id of ``namespace/name``: the low 32 bits of XXH3-64 of its UTF-8 bytes.

    The id 0 is reserved and becomes 1.
    """
    return (xxhash.xxh3_64_intdigest(name.encode()) & 0xFFFFFFFF) or 1


def is_file_name(name: str) -> bool:
    """Whether ``name`` names a file directly in a folder, and nothing outside of that folder."""
    if not name.isprintable() or "/" in name or name in ("", ".", ".."):
        return False
    return len(name.encode("utf-8", "surrogatepass")) <= 255


def check_file_name(owner: str, name: str) -> None:
    """Raises InvalidArgument unless ``name`` is a plain file name; ``owner`` begins the message."""
    if not is_file_name(name):
        raise not_allowed(owner, name, FILE_NAME_FORM)
