"""The gRPC service Serving: lookups, and the description of what a process serves."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..proto import serving_pb2 as pb
from ..proto.errors import InvalidArgument
from ..proto.process.cores import available_cores
from ..proto.process.unary_replies import FEW_KEYS, UnaryReplies
from ..proto.published.model_names import is_version
from ..proto.security.security import TokenEntry, bearer_token, process_security, reaches_namespace
from .client.shard_assignment import ShardAssignment
from .live_sync import FRESHNESS_SEC
from .lookup import DEADLINE_SEC, MOST_KEYS, LocalLookup, checked_keys
from .peers import FoundRows
from .version_features import FEATURE_THREADS, FeatureValues
from .versions import Served, ServedModels

_LOOKUP_THREADS = min(32, available_cores() + 4)


@dataclass(frozen=True)
class Address:
    """The address of the data plane.

    Attributes:
        host: the host named to clients.
        port: the port named to clients.
    """

    host: str
    port: int


class ServingService:
    """Answers clients over gRPC. It belongs to one event loop; rows are read in threads.

    Args:
        models: the versions that this process serves.
        lookup: reads rows of them.
        place: the shard and replica of this process.
        address: the address of the data plane.
    """

    def __init__(self, models: ServedModels, lookup: LocalLookup, place: ShardAssignment, address: Address) -> None:
        self._models = models
        self._lookup = lookup
        self._place = place
        self._address = address
        self._replies = UnaryReplies()
        # Separate from the loop's threads, which check aliases and certificates while lookups here wait for peers.
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "sparserow-lookup")
        self._feature_threads = ThreadPoolExecutor(FEATURE_THREADS, "sparserow-features")

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupReply:
        """Answers with the rows of keys."""
        tables = {}
        for entry in request.tables:
            if entry.table in tables:
                raise InvalidArgument(f"table {entry.table!r} is named twice; put its keys together")
            tables[entry.table] = checked_keys(_keys(entry), entry.table)
        token = bearer_token(context.invocation_metadata())
        loop = asyncio.get_running_loop()
        if sum(len(keys) for keys in tables.values()) > FEW_KEYS:
            ask = partial(self._lookup.dims, request.model, tables, request.routing_key, token=token)
            dims = await loop.run_in_executor(self._threads, ask)
            await self._replies.charge(context, {table: (len(keys), dims[table]) for table, keys in tables.items()})
        look_up = partial(
            self._lookup.lookup,
            request.model,
            tables,
            request.routing_key,
            token=token,
            deadline_sec=_deadline_sec(request.deadline_ms, context.time_remaining()),
        )
        answer = await loop.run_in_executor(self._threads, look_up)
        return pb.LookupReply(
            version=answer.version,
            dense_version=answer.dense_version,
            tables=[_message(rows) for rows in answer.tables],
            problems=answer.problems,
        )

    async def MakeKeys(self, request: pb.MakeKeysRequest, context: Any) -> pb.MakeKeysReply:
        """Answers with the keys that a feature of a version makes of values."""
        if len(request.values) > MOST_KEYS:
            raise InvalidArgument(f"values: {len(request.values)}; allowed: at most {MOST_KEYS} in a call")
        token = bearer_token(context.invocation_metadata())
        asked = FeatureValues(request.feature, list(request.values))
        make = partial(self._lookup.keys, request.model, asked, request.routing_key, token=token)
        version, keys = await asyncio.get_running_loop().run_in_executor(self._feature_threads, make)
        return pb.MakeKeysReply(version=version, keys=keys.tolist())

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        """Answers with the versions and aliases that this process serves, and with its address."""
        book = self._models.book()
        grant = process_security().grant_of(bearer_token(context.invocation_metadata()))
        versions = [
            served
            for (model, _), served in sorted(book.versions.items())
            if request.model in ("", model) and reaches_namespace(grant, served.loaded.namespace)
        ]
        aliases = [
            pb.ServedAlias(
                model=model,
                alias=which,
                version=alias.version,
                canary=alias.canary or 0,
                canary_share=alias.canary_share,
            )
            for (model, which), alias in sorted(book.aliases.items())
            if request.model in ("", model)
            and not is_version(which)
            and reaches_namespace(grant, book.namespace_of(model, alias))
        ]
        return pb.DescribeReply(
            shard=self._place.shard,
            shards=self._place.shards,
            replica=self._place.replica,
            data_host=self._address.host,
            data_port=self._address.port,
            slot_count=versions[0].loaded.slot_count if versions else 0,
            versions=[_described(served) for served in versions],
            aliases=aliases,
            freshness=_freshness(versions),
            problems=self._problems(request.model, grant),
        )

    def _problems(self, model: str, grant: TokenEntry) -> list[str]:
        """Returns the reasons why models are not served as they should be.

        The namespace of a model that could not be loaded is not known, so a token for some namespaces gets none.
        """
        if not reaches_namespace(grant, ""):
            return []
        said = self._models.problems().items()
        return [f"{name}: {problem}" for name, problem in said if model in ("", name.partition("@")[0])]


def _deadline_sec(asked_ms: int, left_sec: float | None) -> float:
    """Returns the deadline of a lookup's requests to peers, in seconds.

    It is at most nine tenths of the time that the call has left, so that the reply can still arrive.
    ``asked_ms`` 0: the request has no deadline; ``left_sec`` None: the call has no limit.
    """
    wanted = asked_ms / 1000 if asked_ms else DEADLINE_SEC
    return wanted if left_sec is None else max(0.001, min(wanted, 0.9 * left_sec))


def _keys(entry: pb.TableKeys) -> Any:
    if not entry.packed_keys:
        return np.array(entry.keys, dtype=np.uint64)
    if entry.keys or len(entry.packed_keys) % 8:
        raise InvalidArgument(
            f"table {entry.table!r}: packed_keys are uint64, 8 bytes each, and stand in place of keys"
        )
    return np.frombuffer(entry.packed_keys, "<u8")


def _message(found: FoundRows) -> pb.TableRows:
    return pb.TableRows(
        table=found.table,
        dim=found.rows.shape[1],
        rows=found.rows.astype("<f4", copy=False).tobytes(),
        found=found.found.tobytes(),
        answered=found.answered.tobytes(),
        versions=found.versions.tolist(),
    )


def _described(served: Served) -> pb.ServedVersion:
    loaded, follower = served.loaded, served.follower
    rows = {table.table_id: table.rows for table in loaded.store.stats()}
    return pb.ServedVersion(
        model=loaded.model,
        version=loaded.version,
        ready=served.is_ready,
        tables=[
            pb.ServedTable(
                name=name,
                id=table.schema.id,
                schema_version=table.schema.version,
                dim=table.schema.dim,
                dtype=table.dtype,
                rows=rows.get(table.schema.id, 0),
            )
            for name, table in sorted(loaded.tables.items())
        ],
        follows=follower is not None and not follower.is_paused,
        behind_sec=follower.behind_sec if follower is not None else 0.0,
        problem=served.problem or (follower.problem if follower is not None else ""),
        rows_synced=follower.stats().rows if follower is not None else 0,
        cluster_id=loaded.cluster_id,
        dense_version=served.dense_version,
    )


def _freshness(versions: list[Served]) -> list[pb.FreshnessBucket]:
    counts = [served.follower.stats().freshness for served in versions if served.follower is not None]
    bounds = (*FRESHNESS_SEC, math.inf)
    return [
        pb.FreshnessBucket(at_most_sec=bound, slots=sum(each[i] for each in counts)) for i, bound in enumerate(bounds)
    ]
