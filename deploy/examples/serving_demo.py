"""What the demo does beside training: publishes, serves with live sync, looks up, and compares rows at the end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, Unavailable
from ...proto.security.security import open_channel, process_security
from ...serving.client.client import ServingClient
from ...worker.membership.shard_client import shard_client
from ...worker.publish.publishing import Publication, publish_from
from ..launch.local_serving import LocalServing, local_serving

_POLL_SEC = 0.2
_LOOKUP_KEYS = 100
_PAUSE_SEC = 0.02  # between lookups, which are a sign of life here and no load
_CATCH_UP_SEC = 30.0


@dataclass(frozen=True)
class ServingFigures:
    """What came of it.

    Attributes:
        rows_checked, rows_equal: training rows at the end, and those whose serving row has the same bits.
        freshness_p99_ms: from a row's change to its being served: the bucket below which 99 in 100 were; None when
            nothing changed while it was followed.
        lookup_p50_ms: of 100 keys, while training went on.
        version: that was published.
    """

    rows_checked: int
    rows_equal: int
    freshness_p99_ms: float | None
    lookup_p50_ms: float
    version: int


class ServingDemo:
    """Runs beside a training in a thread of its own, from ``start`` to ``finish``.

    Args:
        coordinator: of the training cluster.
        namespace: of its tables.
        root: folder for published models.
    """

    def __init__(self, coordinator: str, namespace: str, root: str) -> None:
        self._coordinator = coordinator
        self._namespace = namespace
        self._root = root
        self._trained = threading.Event()
        self._abandoned = threading.Event()
        self._figures: ServingFigures | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sparserow-serving-demo", daemon=True)

    def start(self) -> None:
        """Begins to wait for rows."""
        self._thread.start()

    def finish(self) -> ServingFigures:
        """Once the training has ended and its cluster is still there: waits for the comparison.

        Raises:
            SparserowError: what failed.
        """
        self._trained.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._figures is not None
        return self._figures

    def abandon(self) -> None:
        """The training has failed: stops everything."""
        self._abandoned.set()
        self._trained.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._wait_for_rows()
            if self._abandoned.is_set():
                return
            with ControlClient(self._coordinator) as control:
                published = publish_from(control, self._namespace, Publication(self._namespace, self._root))
            with (
                local_serving(self._namespace, root=self._root, follow=self._coordinator) as serving,
                ServingClient(serving.addresses) as client,
            ):
                keys = self._some_keys()
                seconds = self._look_up(client, keys)
                if self._abandoned.is_set():
                    return
                _wait_until_caught_up(serving)
                checked, equal = self._compare(client)
                self._figures = ServingFigures(
                    rows_checked=checked,
                    rows_equal=equal,
                    freshness_p99_ms=_freshness_p99_ms(serving),
                    lookup_p50_ms=float(np.median(seconds) * 1000),
                    version=published.version,
                )
        except BaseException as error:  # finish() raises it
            self._failure = error

    def _wait_for_rows(self) -> None:
        """Until training has made rows, or is over."""
        while not self._trained.is_set():
            with ControlClient(self._coordinator) as control:
                status = control.status()
            if any(table.rows for shard in status.shards for table in shard.tables):
                return
            self._trained.wait(_POLL_SEC)

    def _look_up(self, client: ServingClient, keys: dict[str, Any]) -> list[float]:
        random = np.random.default_rng(0)
        seconds: list[float] = []
        while not self._trained.is_set() or len(seconds) < 50:
            table = list(keys)[len(seconds) % len(keys)]
            asked = random.choice(keys[table], _LOOKUP_KEYS)
            begin = time.perf_counter()
            client.lookup(table, asked)
            seconds.append(time.perf_counter() - begin)
            time.sleep(_PAUSE_SEC)
        return seconds

    def _some_keys(self) -> dict[str, Any]:
        return {name: keys for name, keys, _ in self._pages(first_only=True)}

    def _compare(self, client: ServingClient) -> tuple[int, int]:
        checked = equal = 0
        for name, keys, rows in self._pages():
            served = client.lookup(name, keys, deadline_ms=10_000)
            checked += len(keys)
            equal += int(((served.rows == rows).all(axis=1) & served.found).sum())
        return checked, equal

    def _pages(self, *, first_only: bool = False) -> list[tuple[str, Any, Any]]:
        """(table, keys, rows) of the training cluster."""
        with ControlClient(self._coordinator) as control:
            view = control.cluster()
            schemas = control.list_tables(self._namespace)
        client = shard_client(view, process_security())
        pages = []
        for schema in schemas:
            for shard in range(len(view.shards)):
                for keys, _, _, rows, _ in client.scan(schema.id, shard=shard):
                    pages.append((schema.name, keys, rows))
                    if first_only:
                        break
        return pages


def _describe(serving: LocalServing) -> list[pb.DescribeReply]:
    replies = []
    for address in serving.addresses:
        with open_channel(address) as channel:
            replies.append(pb_grpc.ServingStub(channel).Describe(pb.DescribeRequest(), timeout=10))
    return replies


def _wait_until_caught_up(serving: LocalServing) -> None:
    begun = time.monotonic()
    while time.monotonic() < begun + _CATCH_UP_SEC:
        quiet_sec = time.monotonic() - begun
        versions = [version for reply in _describe(serving) for version in reply.versions]
        for version in versions:
            if version.problem:
                raise Unavailable(f"live sync: {version.problem}")
        if all(version.behind_sec < quiet_sec for version in versions):
            return
        time.sleep(0.05)
    raise DeadlineExceeded(f"live sync: has not caught up within {_CATCH_UP_SEC:g} s")


def _freshness_p99_ms(serving: LocalServing) -> float | None:
    counts: dict[float, int] = {}
    for reply in _describe(serving):
        for bucket in reply.freshness:
            counts[bucket.at_most_sec] = counts.get(bucket.at_most_sec, 0) + bucket.slots
    total, seen = sum(counts.values()), 0
    for bound in sorted(counts):
        seen += counts[bound]
        if total and seen >= 0.99 * total:
            return bound * 1000
    return None
