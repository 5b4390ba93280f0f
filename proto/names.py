"""Checks names of namespaces, tables and jobs, and makes their 32-bit ids (``id_of_name`` of cpp_ext/util/hash.h)."""

from __future__ import annotations

import xxhash

from .errors import not_allowed

FEATURES_TABLE = "features.json"
DATA_TABLE = "data.safetensors"
_BUFFERS = ".buffers.safetensors"
NAME_FORM = "1-255 printable characters, no '/'"
FILE_NAME_FORM = "a plain file name: 1-255 bytes of printable characters, no '/', neither '.' nor '..'"


def buffers_table(dense: str) -> str:
    """Returns the name of the table with the buffers of the model whose parameters are in table ``dense``."""
    return f"{dense}{_BUFFERS}"


def is_file_table(name: str) -> bool:
    """Whether the rows of a table are the bytes of a file of its namespace, which no model looks up."""
    return name in (FEATURES_TABLE, DATA_TABLE) or name.endswith(_BUFFERS)


def is_model_table(full_name: str, namespace: str) -> bool:
    """Whether a table, named ``namespace/name``, is of this namespace and has rows of a model."""
    owner, _, name = full_name.partition("/")
    return owner == namespace and not is_file_table(name)


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
