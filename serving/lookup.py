"""Lookups of the gRPC and HTTP fronts: from this process's stores, and from its peers for the slots of other shards.

The data plane does not use this module.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..cpp_ext import _server
from ..proto.errors import FailedPrecondition, InvalidArgument, NotFound, not_allowed
from ..proto.published.model_names import handle_of, parse_model, routing_hash
from ..proto.published.registry import Alias
from ..proto.row_keys import hash_key
from ..proto.security.security import check_namespace, process_security, reaches_namespace
from .client.shard_assignment import ShardAssignment
from .loaded_version import LoadedVersion
from .peers import FoundRows, Peers
from .version_features import FeatureValues
from .versions import Served, ServedModels

MOST_KEYS = 1_000_000  # the most keys of a table in one call
DEADLINE_SEC = 1.0  # the deadline of a call that has none


def checked_keys(keys: object, table: str) -> NDArray[np.uint64]:
    """Checks keys and returns them as an array, (n) uint64.

    Args:
        keys: a list of integers, or an array.
        table: the name of the table, for error texts.

    Raises:
        InvalidArgument: the keys are not a list of integers in [0, 2**64), or there are too many.
    """
    if not isinstance(keys, np.ndarray):
        if not isinstance(keys, list | tuple) or not all(type(key) is int for key in keys):
            raise InvalidArgument(f"table {table!r}: keys must be a list of integers")
        wrong = next((key for key in keys if not 0 <= key < 2**64), None)
        if wrong is not None:
            raise not_allowed(f"table {table!r}: key", wrong, "[0, 2**64)")
        keys = np.array(keys, dtype=np.uint64)
    if len(keys) > MOST_KEYS:
        raise InvalidArgument(f"table {table!r}: {len(keys)} keys; allowed: at most {MOST_KEYS} in a call")
    return np.ascontiguousarray(keys, dtype=np.uint64)


def key_of_text(text: str, *, hashed: bool, modulo: int | None = None) -> int:
    """Returns the key that a user has typed.

    Args:
        text: an integer, or a string to hash.
        hashed: whether ``text`` is a string to hash.
        modulo: the key is the remainder by this number, as in the models of job files; None: the number itself.

    Raises:
        InvalidArgument: ``text`` is not an integer in [0, 2**64), and is not to be hashed.
    """
    if not hashed and (not re.fullmatch("[0-9]{1,20}", text) or int(text) >= 2**64):
        raise InvalidArgument(f"key {text!r} is no integer in [0, 2**64); strings are hashed with --hash")
    key = hash_key(text) if hashed else int(text)
    return key if modulo is None else key % modulo


@dataclass(frozen=True)
class LookupAnswer:
    """The result of a lookup.

    Attributes:
        version: the version of the model that answered.
        dense_version: the number of the newest dense weights published for it; 0: those of its program.
        tables: the results of the tables, in the order of the request.
        problems: the reasons why rows were not answered; () when all were.
    """

    version: int
    dense_version: int
    tables: list[FoundRows]
    problems: tuple[str, ...] = ()


class LocalLookup:
    """Looks up rows in the stores of this process, and through its peers the rows of other shards. Thread-safe.

    Args:
        models: the versions that this process serves.
        place: the shard and replica of this process.
        peers: the processes of the other shards; None: keys of other shards stay unanswered.
    """

    def __init__(self, models: ServedModels, place: ShardAssignment, peers: Peers | None = None) -> None:
        self._models = models
        self._place = place
        self._peers = peers

    def lookup(
        self,
        model: str,
        tables: dict[str, NDArray[np.uint64]],
        routing_key: str = "",
        *,
        token: str = "",
        deadline_sec: float = DEADLINE_SEC,
    ) -> LookupAnswer:
        """Looks up rows of a model, all of one version.

        Rows that peers do not answer within the deadline are zeros, with ``answered`` False.

        Args:
            model: ``NAME[@ALIAS|@VERSION]``.
            tables: the keys by table, (n) uint64.
            routing_key: names the caller, and so chooses between a version and its canary; "": the version itself.
            token: the caller's token; "": it has none.
            deadline_sec: how long peers may take, in seconds.

        Raises:
            PermissionDenied: this process does not accept ``token``, or the token does not reach the model's
                namespace.
            NotFound: the model, alias or table is not served; the text lists what is.
            InvalidArgument: ``model`` does not have that form.
        """
        deadline = time.monotonic() + deadline_sec
        name, version, served = self._checked(model, tables, routing_key, token)
        loaded = served.loaded
        found = [self._own(loaded, table, keys) for table, keys in tables.items()]
        if all(bool(part.answered.all()) for part in found):
            return LookupAnswer(version, served.dense_version, found)
        if self._peers is None:
            return LookupAnswer(version, served.dense_version, found, (self._whose(loaded, tables),))
        shapes = [loaded.tables[table].schema for table in tables]
        problems = self._peers.complete(handle_of(name, version), shapes, list(tables.values()), found, deadline)
        return LookupAnswer(version, served.dense_version, found, problems)

    def keys(
        self, model: str, asked: FeatureValues, routing_key: str = "", *, token: str = ""
    ) -> tuple[int, NDArray[np.uint64]]:
        """Returns the version that answers, and the keys that its feature makes of values, (n) uint64.

        Raises:
            FailedPrecondition: the version was published without features.
            InvalidArgument: it has no such feature, or the feature refuses a value.
            PermissionDenied, NotFound: see :meth:`lookup`.
        """
        name, version, served = self._checked(model, (), routing_key, token)
        features = served.loaded.features
        if features is None:
            raise FailedPrecondition(f"{name}@{version} follows training without a publication; look up keys")
        return version, features.keys(asked)

    def dims(self, model: str, tables: Iterable[str], routing_key: str = "", *, token: str = "") -> dict[str, int]:
        """Returns the number of columns of each table; see :meth:`lookup` for the arguments and errors."""
        loaded = self._checked(model, tables, routing_key, token)[2].loaded
        return {table: loaded.tables[table].schema.dim for table in tables}

    def _checked(self, model: str, tables: Iterable[str], routing_key: str, token: str) -> tuple[str, int, Served]:
        """Chooses the version that answers, and checks that it has the tables and that the token may read them.

        Returns:
            The model's name, the number of the version, and the version.
        """
        name, which = parse_model(model)
        grant = process_security().grant_of(token)
        version, served = self._chosen(name, which, routing_hash(routing_key), partial(reaches_namespace, grant))
        loaded = served.loaded
        check_namespace(grant, loaded.namespace)
        unknown = next((table for table in tables if table not in loaded.tables), None)
        if unknown is not None:
            raise NotFound(f"table {unknown!r} is not in {model}; its tables: {', '.join(sorted(loaded.tables))}")
        return name, version, served

    def _chosen(self, name: str, which: str, routing: int, reaches: Callable[[str], bool]) -> tuple[int, Served]:
        """Chooses the version that answers.

        While an alias moves, the processes get its new version at different moments. Until all of them have it, a
        version that all of them have answers.
        """
        alias, versions = self._models.find(name, which, reaches)
        common = self._peers.alias(name, which) if self._peers is not None else None
        if common is not None and common.version != alias.version:
            with contextlib.suppress(NotFound):
                versions = {common.version: self._models.find(name, str(common.version))[1][common.version]}
                alias = Alias(common.version)
        elif common is not None and common.canary != alias.canary:
            alias = Alias(alias.version)  # without the canary, until all processes have it
        version = _routed(alias, routing)
        return version, versions[version]

    def _whose(self, loaded: LoadedVersion, tables: dict[str, NDArray[np.uint64]]) -> str:
        owners = np.unique(np.concatenate([self._owners(loaded, table, keys) for table, keys in tables.items()]))
        others = ", ".join(str(shard) for shard in owners if shard != self._place.shard)
        return (
            f"keys belong to serving shards {others} of {self._place.shards}; ask those, or start serving with --peers"
        )

    def _owners(self, loaded: LoadedVersion, table: str, keys: NDArray[np.uint64]) -> NDArray[np.uint16]:
        slots = _server.slots_of(loaded.tables[table].schema.id, keys, loaded.slot_count)
        return np.asarray(self._place.owners(loaded.slot_count)[slots])

    def _own(self, loaded: LoadedVersion, table: str, keys: NDArray[np.uint64]) -> FoundRows:
        rows, versions, is_found = loaded.store.pull(loaded.tables[table].schema.id, keys)
        answered = self._owners(loaded, table, keys) == self._place.shard
        values = np.where(answered[:, None], rows, np.float32(0)) if not answered.all() else rows
        return FoundRows(
            table,
            np.ascontiguousarray(values, dtype=np.float32),
            np.where(answered, versions, np.uint64(0)),
            is_found & answered,
            answered,
        )


def _routed(alias: Alias, routing: int) -> int:
    if alias.canary is None or routing == 0:
        return alias.version
    return alias.canary if _server.routes_to_canary(routing, alias.canary_share) else alias.version
