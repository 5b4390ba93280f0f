"""Names of models, aliases and versions as users write them, and the numbers that routing makes of them."""

from __future__ import annotations

import re

import xxhash

from ..errors import not_allowed
from ..names import id_of_name

DEFAULT_ALIAS = "live"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_name(what: str, name: str) -> str:
    """Raises InvalidArgument unless ``name`` may name a model or an alias."""
    if not NAME_PATTERN.fullmatch(name) or name.isdecimal():
        raise not_allowed(what, name, "1 to 100 of A-Z a-z 0-9 _ . -, not digits alone")
    return name


def parse_model(text: str) -> tuple[str, str]:
    """``NAME[@ALIAS|@VERSION]`` as its two parts; the alias is ``live`` when it is left out."""
    name, at, which = text.partition("@")
    check_name("model", name)
    which = which if at else DEFAULT_ALIAS
    if not which.isdecimal():
        check_name("alias", which)
    return name, which


def handle_of(model: str, which: str | int) -> int:
    """The 32-bit handle of ``MODEL@VERSION`` or ``MODEL@ALIAS`` on the data plane."""
    return id_of_name(f"{model}@{which}")


def routing_hash(routing_key: str) -> int:
    """The number by which the versions of an alias share out routing keys; 0 for an empty routing key."""
    return (xxhash.xxh3_64_intdigest(routing_key.encode()) | 1) if routing_key else 0
