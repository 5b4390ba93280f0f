"""Parses names of models, aliases and versions, and makes the numbers that routing uses."""

from __future__ import annotations

import re

import xxhash

from ..errors import not_allowed
from ..names import id_of_name

DEFAULT_ALIAS = "live"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

_VERSION = re.compile(r"[0-9]{1,18}")  # other digits than these, which Python takes for numbers too, are none


def check_name(what: str, name: str) -> str:
    """Returns ``name``; raises InvalidArgument unless it may name a model or an alias. ``what`` begins the message."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name) or name.isdecimal():
        raise not_allowed(what, name, "1 to 100 of A-Z a-z 0-9 _ . -, not digits alone")
    return name


def parse_model(text: str) -> tuple[str, str]:
    """Returns the two parts of ``NAME[@ALIAS|@VERSION]``; a missing alias is ``live``."""
    if not isinstance(text, str):
        raise not_allowed("model", text, "NAME, NAME@ALIAS or NAME@VERSION as text")
    name, at, which = text.partition("@")
    check_name("model", name)
    which = which if at else DEFAULT_ALIAS
    if not is_version(which):
        check_name("alias", which)
    return name, which


def is_version(which: str) -> bool:
    """Whether a text behind ``@`` is the number of a version, which has 1 to 18 digits, and no alias."""
    return _VERSION.fullmatch(which) is not None


def handle_of(model: str, which: str | int) -> int:
    """Returns the 32-bit handle of ``MODEL@VERSION`` or ``MODEL@ALIAS`` on the data plane."""
    return id_of_name(f"{model}@{which}")


def routing_hash(routing_key: str) -> int:
    """Returns the number by which an alias assigns a routing key to one of its versions; 0 for an empty routing key.

    Raises:
        InvalidArgument: the routing key is no text of Unicode.
    """
    try:
        encoded = routing_key.encode()
    except (AttributeError, UnicodeEncodeError):  # a lone surrogate, which JSON can have
        raise not_allowed("routing_key", routing_key, "text of Unicode, which is empty for none") from None
    return (xxhash.xxh3_64_intdigest(encoded) | 1) if encoded else 0
