"""The serving part of the demo: it publishes, serves with live sync, looks up rows, and compares them at the end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, Unavailable
from ...proto.names import is_file_table, is_model_table
from ...proto.security.channels import SecureChannel
from ...proto.security.security import process_security
from ...proto.status.figures import step_quantile
from ...serving.client.client import ServingClient
from ...worker.membership.shard_client import shard_client
from ...worker.publish.publishing import Publication, publish_from
from ..launch.local_serving import LocalServing, local_serving

_POLL_SEC = 0.2
_LOOKUP_KEYS = 100
_PAUSE_SEC = 0.02  # between lookups, which only show that serving works and are no load
_CATCH_UP_SEC = 30.0


@dataclass(frozen=True)
class ServingFigures:
    """The figures of the serving part.

    Attributes:
        rows_checked, rows_equal: the number of training rows at the end, and of those whose serving row has the same
            bits.
        freshness_p99_ms: the bound in milliseconds below which 99 of 100 changes were served; None when nothing
            changed.
        lookup_p50_ms: the median time of a lookup of 100 keys during training, in milliseconds.
        version: the number of the published version.
    """

    rows_checked: int
    rows_equal: int
    freshness_p99_ms: float | None
    lookup_p50_ms: float
    version: int


class ServingDemo:
    """The serving part, which runs beside a training in a thread of its own, from ``start`` to ``finish``.

    Args:
        coordinator: ``HOST:PORT`` of the training cluster's coordinator.
        namespace: the namespace of its tables.
        root: the folder for published models.
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
        """Starts the thread, which waits for rows."""
        self._thread.start()

    def finish(self) -> ServingFigures:
        """Waits for the comparison, once the training has ended and while its cluster still runs.

        Raises:
            SparserowError: the serving part has failed.
        """
        self._trained.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._figures is not None
        return self._figures

    def abandon(self) -> None:
        """Stops everything, because the training has failed."""
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
        """Waits until the model has rows, or its training is over; files of the namespace have rows before."""
        while not self._trained.is_set():
            with ControlClient(self._coordinator) as control:
                status = control.status()
            tables = [table for shard in status.shards for table in shard.tables]
            if any(table.rows and is_model_table(table.name, self._namespace) for table in tables):
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
        """Returns (table, keys, rows) pages of the training cluster."""
        with ControlClient(self._coordinator) as control:
            view = control.cluster()
            schemas = [schema for schema in control.list_tables(self._namespace) if not is_file_table(schema.name)]
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
        with SecureChannel(address) as channel:
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
    raise DeadlineExceeded(f"live sync: the serving process has not caught up within {_CATCH_UP_SEC:g} s")


def _freshness_p99_ms(serving: LocalServing) -> float | None:
    counts: dict[float, int] = {}
    for reply in _describe(serving):
        for bucket in reply.freshness:
            counts[bucket.at_most_sec] = counts.get(bucket.at_most_sec, 0) + bucket.slots
    bounds = sorted(counts)
    found = step_quantile(bounds, [counts[bound] for bound in bounds], 0.99)
    return None if found is None else found * 1000
