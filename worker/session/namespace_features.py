"""What a namespace keeps of features, as rows of a table of its own, so that it is saved, restored and dropped with it.

A row has 256 bytes of the document, each as one number: every dtype of the wire has these exactly. The row of
``_HEAD_KEY`` is written last and has the length and the digest of the whole, so that no reader takes a part for it. Two
documents alternate between two ranges of keys, and the former one's rows are deleted: nothing grows.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch.distributed as dist
from xxhash import xxh3_128_digest

from ...proto.errors import DataLoss, DeadlineExceeded, InvalidArgument, SparserowError, not_allowed
from ...proto.features.feature_set import FeatureSet
from ...proto.features.kept import MOST_BYTES, NOTHING_KEPT, KeptFeatures, is_kept, kept_of
from ...proto.names import FEATURES_TABLE
from ...proto.optimizers import SGD
from ...proto.row_keys import KeyArray
from ...proto.schema import Constant, TableSchema
from .table import TableRows

if TYPE_CHECKING:
    from .session_core import SessionCore

_log = logging.getLogger(__name__)

FeaturesPolicy: TypeAlias = Literal["keep", "refit"]
Fit: TypeAlias = Callable[[FeatureSet], FeatureSet]

_ROW_BYTES = 256
_ROWS_AT_ONCE = 16384
_HEAD_KEY = 2**63 - 1
_HEAD = struct.Struct("<4sIQ16s")  # magic, the range of keys, the length, the digest
_MAGIC = b"SPRF"
_RANGE = 1 << 32
_TRIES = 5
_POLL_SEC = 0.2
_MOST_NAMED = 5
_WAIT_SEC = 1800.0


class NamespaceDocument:
    """The document of a namespace, of at most 64 MiB.

    Args:
        core: a session of the namespace.
    """

    def __init__(self, core: SessionCore) -> None:
        self._core = core
        self._where = f"table {core.namespace}/{FEATURES_TABLE}"

    def read(self) -> KeptFeatures:
        """Returns the features that the namespace keeps.

        Raises:
            DataLoss: the rows are those of no document, as after a shard came back from an older checkpoint.
        """
        if all(schema.name != FEATURES_TABLE for schema in self._core.catalog.list_tables(self._core.namespace)):
            return NOTHING_KEPT
        table = self._core.table(FEATURES_TABLE)
        for _ in range(_TRIES):
            head = self._head(table)
            if head is None:
                return NOTHING_KEPT
            place, length, digest = head
            data = _bytes_of(table, place, length)
            if xxh3_128_digest(data) == digest:
                return kept_of(data, self._where)
            time.sleep(_POLL_SEC)  # another worker is writing the next document
        raise DataLoss(
            f"{self._where}: its rows are of different documents, as after a shard came back from an older checkpoint; "
            "restore a checkpoint, or begin with features_policy refit"
        )

    def write(self, kept: KeptFeatures) -> None:
        """Keeps these features in place of those before."""
        data, core = kept.written(), self._core
        if len(data) > MOST_BYTES:
            raise InvalidArgument(
                f"features: their statistics need {len(data):,} bytes; allowed: at most {MOST_BYTES:,} in a namespace"
            )
        rows = core.create_table(
            TableSchema(core.namespace, FEATURES_TABLE, _ROW_BYTES, SGD(lr=0.0), init=Constant(0.0))
        )
        former = self._head(rows)
        place = 0 if former is None else 1 - former[0]
        values = np.zeros((math.ceil(len(data) / _ROW_BYTES), _ROW_BYTES), dtype=np.float32)
        values.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        for begin in range(0, len(values), _ROWS_AT_ONCE):
            some = values[begin : begin + _ROWS_AT_ONCE]
            rows.assign(_keys(place, begin, begin + len(some)), some)
        head = np.zeros((1, _ROW_BYTES), dtype=np.float32)
        packed = _HEAD.pack(_MAGIC, place, len(data), xxh3_128_digest(data))
        head[0, : _HEAD.size] = np.frombuffer(packed, dtype=np.uint8)
        rows.assign([_HEAD_KEY], head)
        if former is not None:
            count = math.ceil(former[1] / _ROW_BYTES)
            for begin in range(0, count, _ROWS_AT_ONCE):
                rows.delete(_keys(former[0], begin, min(count, begin + _ROWS_AT_ONCE)))

    def _head(self, table: TableRows) -> tuple[int, int, bytes] | None:
        row = table.pull([_HEAD_KEY])[0]
        if not row.any():
            return None
        magic, place, length, digest = _HEAD.unpack(row.astype(np.uint8).tobytes()[: _HEAD.size])
        if magic != _MAGIC or place > 1 or length > MOST_BYTES:
            raise DataLoss(f"{self._where}: its first row is that of no document; drop the table")
        return place, length, digest


def _keys(place: int, begin: int, end: int) -> KeyArray:
    return np.arange(place * _RANGE + begin, place * _RANGE + end, dtype=np.uint64)


def _bytes_of(table: TableRows, place: int, length: int) -> bytes:
    count = math.ceil(length / _ROW_BYTES)
    parts = [
        table.pull(_keys(place, begin, min(count, begin + _ROWS_AT_ONCE))).astype(np.uint8).tobytes()
        for begin in range(0, count, _ROWS_AT_ONCE)
    ]
    return b"".join(parts)[:length]


def agreed_features(
    core: SessionCore, features: FeatureSet, fit: Fit, *, policy: FeaturesPolicy = "keep", run: str = ""
) -> FeatureSet:
    """Returns features with the statistics that their namespace keeps, on every worker of a job, which all call it.

    Those that it does not keep yet are learnt by one worker: rank 0 where the workers have a process group, and else
    the lowest rank in the job, for which the others wait, 30 minutes at most.

    Args:
        core: the session of this worker.
        features: the features, which may lack statistics.
        fit: returns the features that it is given with statistics; some of them may have theirs.
        policy: "keep": features that differ from those of an earlier run are refused. "refit": they take their place.
        run: a name that all workers of the run have alone, also those that join it later; "": there is none.

    Raises:
        FailedPrecondition: a feature differs from that of an earlier run, or of another worker; the text names it.
        InvalidArgument: ``policy`` is none, or is "refit" in a job of several workers without a process group that has
            no ``run``.
        DeadlineExceeded: another worker did not give the features in time.
        DataLoss: the namespace's document is damaged.
    """
    if policy not in ("keep", "refit"):
        raise not_allowed("features_policy", policy, "keep, refit")
    meets = core.is_distributed and dist.is_available() and dist.is_initialized()
    if policy == "refit" and not run and core.placement.world_size > 1 and not meets:
        raise InvalidArgument(
            "features_policy: refit is not possible in a job of several workers without a process group, as each would "
            "learn its own; refit them in a session of one worker before; allowed: keep"
        )
    if not any(is_kept(features, feature) for feature in features.features):
        return features
    agreement = _Agreement(core, features, fit, is_refit=policy == "refit", run=run)
    kept = _of_first_rank(agreement.made) if meets else agreement.alone()
    return features.with_statistics(kept.statistics_for(features, core.namespace))


def check_kept(core: SessionCore, features: FeatureSet) -> None:
    """Checks that features have the statistics and vocabularies that their namespace keeps, if it keeps any.

    Raises:
        FailedPrecondition: a feature differs; the text names it.
        DataLoss: the namespace's document is damaged.
    """
    NamespaceDocument(core).read().statistics_for(features, core.namespace)


def _tell_of_earlier(core: SessionCore, features: FeatureSet) -> None:
    """Logs one line where the namespace had statistics before the job, unless a ``namespace_policy`` was given."""
    if core.placement.rank == 0 and FEATURES_TABLE in (core.found_tables or {}):
        names = [feature.name for feature in features.features if is_kept(features, feature)]
        _log.warning(
            "namespace %r: the statistics and vocabularies of %s%s are those of an earlier run "
            "(features_policy='refit' takes this run's)",
            core.namespace,
            ", ".join(names[:_MOST_NAMED]),
            f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "",
        )


def _of_first_rank(made: Callable[[], KeptFeatures]) -> KeptFeatures:
    box: list[KeptFeatures | SparserowError | None] = [None]
    if dist.get_rank() == 0:
        try:
            box = [made()]
        except SparserowError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    (result,) = box
    if isinstance(result, SparserowError):
        raise result
    assert result is not None
    return result


class _Agreement:
    """What :func:`agreed_features` does on one worker."""

    def __init__(self, core: SessionCore, features: FeatureSet, fit: Fit, *, is_refit: bool, run: str) -> None:
        self._core, self._features, self._fit = core, features, fit
        self._is_refit, self._run = is_refit, run
        self._document = NamespaceDocument(core)

    def _read(self) -> tuple[KeptFeatures, bool]:
        """Returns what the namespace keeps, and whether this run goes by it."""
        try:
            kept = self._document.read()
        except DataLoss:
            if self._is_refit:
                return NOTHING_KEPT, False
            raise
        joins = self._core.identity is not None and self._core.identity.first_step > 0
        return kept, not self._is_refit or joins or (self._run != "" and kept.run == self._run)

    def _found(self) -> KeptFeatures | None:
        """Returns what the namespace keeps where it has all that the run needs, or None."""
        kept, counts = self._read()
        return kept if counts and not kept.lacks(self._features) else None

    def made(self) -> KeptFeatures:
        """Returns what the namespace keeps, after features that it did not keep were learnt here."""
        kept, counts = self._read()
        if counts and not kept.lacks(self._features):
            _tell_of_earlier(self._core, self._features)
            return kept
        known = kept.statistics_for(self._features, self._core.namespace) if counts else {}
        made = kept.holding(self._fit(self._features.with_statistics(known)), self._run)
        self._document.write(made)
        return made

    def alone(self) -> KeptFeatures:
        """Returns what the namespace keeps, which is made here or by a lower rank."""
        deadline = time.monotonic() + _WAIT_SEC
        if self._core.is_lowest_rank():
            return self.made()
        while (found := self._found()) is None:
            if self._core.is_lowest_rank():
                return self.made()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"features: no rank before rank {self._core.placement.rank} has given namespace "
                    f"{self._core.namespace!r} its statistics in {_WAIT_SEC:g} s"
                )
            time.sleep(_POLL_SEC)
        return found
