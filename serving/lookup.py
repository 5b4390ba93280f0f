"""Lookups in this process's own slots, for the gRPC and HTTP fronts; the data plane does without this."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..cpp_ext import _server
from ..proto.errors import InvalidArgument, NotFound
from .models import ServedModels
from .place import Place
from .registry import Alias, parse_model

MOST_KEYS = 1_000_000  # of one call


@dataclass(frozen=True)
class FoundRows:
    """Rows of one table: rows (n, dim) float32, versions (n), found (n), and answered (n): False where the key belongs
    to another shard.
    """

    table: str
    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]
    found: NDArray[np.bool_]
    answered: NDArray[np.bool_]


def routing_hash(routing_key: str) -> int:
    """The number by which an alias's versions share out who asks; 0 for nobody."""
    return (xxhash.xxh3_64_intdigest(routing_key.encode()) | 1) if routing_key else 0


def checked_keys(keys: object, table: str) -> NDArray[np.uint64]:
    """Keys as (n) uint64.

    Raises:
        InvalidArgument: they are no list of integers in [0, 2**64), or too many.
    """
    if not isinstance(keys, np.ndarray):
        if not isinstance(keys, list | tuple) or not all(type(key) is int for key in keys):
            raise InvalidArgument(f"table {table!r}: keys must be a list of integers")
        wrong = next((key for key in keys if not 0 <= key < 2**64), None)
        if wrong is not None:
            raise InvalidArgument(f"table {table!r}: key {wrong} is not allowed; allowed: [0, 2**64)")
        keys = np.array(keys, dtype=np.uint64)
    if len(keys) > MOST_KEYS:
        raise InvalidArgument(f"table {table!r}: {len(keys)} keys; allowed: at most {MOST_KEYS} in a call")
    return np.ascontiguousarray(keys, dtype=np.uint64)


def key_of_text(text: str, *, hashed: bool) -> int:
    """A key as a user types it.

    Raises:
        InvalidArgument: it is no integer in [0, 2**64), and is not to be hashed.
    """
    if hashed:
        return int(_server.key_of_bytes(text.encode()))
    if not text.isdecimal() or int(text) >= 2**64:
        raise InvalidArgument(f"key {text!r} is no integer in [0, 2**64); strings are hashed with --hash")
    return int(text)


class LocalLookup:
    """Answers from the stores of this process. Thread-safe.

    Args:
        models: what is served.
        place: whose slots.
    """

    def __init__(self, models: ServedModels, place: Place) -> None:
        self._models = models
        self._place = place

    def lookup(
        self, model: str, tables: dict[str, NDArray[np.uint64]], routing_key: str = ""
    ) -> tuple[int, list[FoundRows]]:
        """Rows of ``model`` (``NAME[@ALIAS|@VERSION]``), and the number of the version that answered.

        Raises:
            NotFound: the model, alias or table is not served (says what is).
            InvalidArgument: the model's name is not of that form.
        """
        alias, versions = self._models.find(*parse_model(model))
        version = _routed(alias, routing_hash(routing_key))
        loaded = versions[version].loaded
        owned = self._place.owned(loaded.slot_count)
        found = []
        for name, keys in tables.items():
            table = loaded.tables.get(name)
            if table is None:
                raise NotFound(f"table {name!r}: is not in {model}; it has: {', '.join(sorted(loaded.tables))}")
            rows, versions_of_rows, is_found = loaded.store.pull(table.schema.id, keys)
            answered = owned[_server.slots_of(table.schema.id, keys, loaded.slot_count)]
            values = np.where(answered[:, None], rows, np.float32(0)) if not answered.all() else rows
            found.append(
                FoundRows(
                    name,
                    np.ascontiguousarray(values, dtype=np.float32),
                    np.where(answered, versions_of_rows, np.uint64(0)),
                    is_found & answered,
                    answered,
                )
            )
        return version, found


def _routed(alias: Alias, routing: int) -> int:
    if alias.canary is None or routing == 0:
        return alias.version
    return alias.canary if _server.routes_to_canary(routing, alias.canary_share) else alias.version
