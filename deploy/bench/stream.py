"""``bench stream``: a model that learns day after day, against the same model in plain torch.

The protocol is that of MLPerf's DLRM-v3 on its streaming data: train on the requests of a timestamp, evaluate on those
of the next one, go on. Tables (items, categories of items, users), their width of 512, row-wise Adagrad and batches of
64 are those of its configuration (``dlrm_v3/configs.py`` of meta-recsys/generative-recommenders); items and users are
divided by one number. The tower is DIN in place of HSTU, which the zoo has not.

The data follow its generator (``dlrm_v3/streaming_synthetic_data.py``): a user has four categories, from which items
are drawn by a Polya urn with a parameter of 1 to 500; items come to be over the timestamps; a rating is the mean of the
item's own and of what the user gives the category, which moves with the cosine of the timestamp. That a rating above
3.5 is a click is a choice of this benchmark.

Measured are the normalised entropy of each timestamp (He et al., "Practical lessons from predicting clicks on ads at
Facebook", 2014: the log loss divided by the entropy of the mean label), samples a second, and freshness: the time from
a change of a row to where a serving process that follows the job has it.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...proto.config.job import JobConfig
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition, SparserowError
from ...proto.options.document import validate
from ...worker.training.process_group import WorkerGroup
from ...worker.training.trainer import Trainer
from ...worker.training.training_report import Silence
from ..launch.local_cluster import local_cluster
from ..launch.local_serving import LocalServing, local_serving
from ..train.days import run_days
from .harness import Figure
from .serving_sync import describe, percentile
from .zoo import SameBeginning

LIMIT_OF_ENTROPY = 1e-3
_ITEMS, _USERS, _CATEGORIES, _OF_USER, _DIM, _BATCH = 1_000_000_000, 10_000_000, 128, 4, 512, 64
_RATINGS, _SHARES = (5.0, 4.0, 3.0, 2.0, 1.0), (0.2, 0.25, 0.25, 0.2, 0.1)
_WAIT_SEC = 60.0
_CLICK = 3.5  # a rating above it is a click
# With 0.05 for rows, runs in torch alone differ by 0.002 between one thread and two: a step makes more of a last bit.
_DENSE_RATE, _ROW_RATE = 0.001, 0.01
_FIRST = date(2026, 1, 1)
_TABLE = "embeddings.tables.item"
_NAME = "stream"


@dataclass(frozen=True)
class StreamSize:
    """The size of the run.

    Attributes:
        scale: what the numbers of items and users are divided by.
        dim: the width of the tables.
        days: the number of timestamps that are trained on; one more is tested on.
        steps: the number of batches of a timestamp.
        history: the number of items of a history.
    """

    scale: int
    dim: int
    days: int
    steps: int
    history: int

    @property
    def items(self) -> int:
        """The number of items, a multiple of that of the categories."""
        return max(1, _ITEMS // self.scale // _CATEGORIES) * _CATEGORIES

    @property
    def users(self) -> int:
        """The number of users."""
        return max(1, _USERS // self.scale)


FULL = StreamSize(scale=20_000, dim=_DIM, days=5, steps=300, history=20)
QUICK = StreamSize(scale=1_000_000, dim=8, days=2, steps=8, history=4)


class Requests:
    """Makes the requests of one timestamp after another."""

    def __init__(self, size: StreamSize) -> None:
        self._size, self._random = size, np.random.default_rng(1001)
        random, users = self._random, size.users
        self._ratings = random.choice(_RATINGS, size.items, p=_SHARES)
        self._own = np.stack([random.permutation(_CATEGORIES)[:_OF_USER] for _ in range(users)])
        self._counts = np.zeros((users, _OF_USER), np.int64)
        self._histories: list[list[int]] = [[] for _ in range(users)]

    def of_timestamp(self, number: int) -> pa.Table:
        """Returns the requests of a timestamp, from 0; -1: what is in the histories before the first one."""
        size, random = self._size, self._random
        rows = size.users * size.history if number < 0 else _BATCH * size.steps
        users = np.repeat(np.arange(size.users), size.history) if number < 0 else random.integers(0, size.users, rows)
        alpha = random.integers(1, 501, size.users)[users]
        # A request's category is drawn by what its user had when the timestamp began.
        counts = self._counts[users]
        shares = (alpha[:, None] / _OF_USER + counts) / (alpha + counts.sum(axis=1))[:, None]
        place = (random.random(rows)[:, None] > shares.cumsum(axis=1)[:, :-1]).sum(axis=1)
        category = self._own[users, place]
        each = size.items // _CATEGORIES
        known = max(1, each * max(number + 1, 1) // (size.days + 1))
        item = category * each + random.integers(0, known, rows)
        rating = (self._of_category(number, place) + self._ratings[item]) / 2
        histories = [np.array(history, np.int64) for history in self._histories]
        np.add.at(self._counts, (users, place), 1)
        for user, taken in zip(users.tolist(), item.tolist(), strict=True):
            self._histories[user].append(taken)
        for history in self._histories:
            del history[: -size.history]
        seen = [histories[user] for user in users.tolist()]
        return pa.table(
            {
                "click": (rating > _CLICK).astype(np.int8),
                "user": users,
                "item": item,
                "category": category,
                "items": seen,
                "categories": [history // each for history in seen],
            }
        )

    def _of_category(self, number: int, place: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns what users give categories: the first of a user's ones more, and each moving with the timestamps."""
        cosines = [math.cos((number + shift) * math.pi / 4) / 2 for shift in (0, 2, 4)]
        drawn = self._random.random(len(place))
        near = np.where(place == 0, drawn > 0.8, (drawn > 0.1).astype(np.int64) + (drawn > 0.9))
        base = np.choose(place, (4.0, 4.0, 3.0, 2.0))
        moved: NDArray[np.float64] = base + np.choose(near, (0.5, 0.0, -0.5)) + np.array(cosines)[near]
        return moved


class _Served:
    """A serving process that follows the job, as soon as it has a table."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._follows, self._is_over = threading.Event(), threading.Event()
        self._ages: dict[float, int] = {}
        self.problem = "the job had no table"

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Serves for the time of the block."""
        work = threading.Thread(target=self._serve, daemon=True)
        work.start()
        try:
            yield
        finally:
            self._is_over.set()
            work.join(60)

    def wait_until_it_follows(self) -> None:
        """Returns as soon as the process follows the job, or cannot, at the latest after a minute.

        What it catches up with when it starts has no freshness, so what is trained before it follows is not measured.
        """
        self._follows.wait(_WAIT_SEC)

    def freshness(self) -> tuple[float, float]:
        """Returns the median and the 99th percentile of the time from a change to where it is served, in seconds.

        Raises:
            FailedPrecondition: no row was served while the job trained.
        """
        if not any(self._ages.values()):
            raise FailedPrecondition(f"bench stream: no row was served while the job trained: {self.problem}")
        return percentile(self._ages, 0.5), percentile(self._ages, 0.99)

    def _serve(self) -> None:
        try:
            with ControlClient(self._address) as control:
                while not any(schema.name == _TABLE for schema in control.status().tables):
                    if self._is_over.wait(0.1):
                        return
            with local_serving(_NAME, follow=self._address, namespace=_NAME) as serving:
                _wait_for(lambda: all(math.isfinite(each.behind_sec) for each in describe(serving).versions))
                self._follows.set()
                self._is_over.wait()
                _wait_for(lambda: self._has_ages(serving))  # because rounds of the sync are timed
        except SparserowError as error:
            self.problem = str(error)
        finally:
            self._follows.set()

    def _has_ages(self, serving: LocalServing) -> bool:
        reply = describe(serving)
        self._ages = {bucket.at_most_sec: bucket.slots for bucket in reply.freshness}
        self.problem = "; ".join(reply.problems)
        return any(self._ages.values())


def run_stream(size: StreamSize) -> Iterator[Figure]:
    """Yields the normalised entropy of each timestamp on servers and in torch, samples/s and freshness.

    Raises:
        FailedPrecondition: no row was served while the job trained.
    """
    words = f"stream: {size.items:,} items, {size.users:,} users, dim {size.dim}, {size.days} timestamps"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = Requests(size)
        requests.of_timestamp(-1)
        entropies = [_written(folder, number, requests.of_timestamp(number)) for number in range(size.days + 1)]
        with local_cluster(shards=2) as cluster:
            served = _Served(cluster.address)
            with served.beside():
                results = []
                for each in run_days(_job(size, folder, cluster.address), resume="never", note=lambda _: None):
                    results.append(each.result)
                    served.wait_until_it_follows()
        ours = [each.test_log_loss / entropy for each, entropy in zip(results, entropies[1:], strict=True)]
        theirs = [_in_torch(size, folder, last) / entropies[last + 1] for last in range(size.days)]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        yield Figure(f"{words}: normalised entropy after {number}, on servers", mine, "of 1", higher_is_better=False)
        yield Figure(f"{words}: normalised entropy after {number}, in torch", other, "of 1", higher_is_better=False)
    apart = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    for which, value, limit in (
        ("difference of the means", abs(statistics.mean(apart)), LIMIT_OF_ENTROPY),
        ("largest difference", max(map(abs, apart)), None),
    ):
        yield Figure(f"{words}: normalised entropy, {which}", value, "of 1", limit, higher_is_better=False)
    rate = statistics.median(each.samples_per_sec for each in results)
    yield Figure(f"{words}: trained on, batches of {_BATCH}", rate, "samples/s")
    for share, seconds in zip(("p50", "p99"), served.freshness(), strict=True):
        yield Figure(f"{words}: freshness, {share} at most", seconds, "s", higher_is_better=False)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_SEC / 2
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _day(number: int) -> str:
    return (_FIRST + timedelta(days=number)).isoformat()


def _written(folder: Path, number: int, requests: pa.Table) -> float:
    """Writes the requests of a timestamp; returns the entropy of their mean label."""
    path = folder / f"dt={_day(number)}"
    path.mkdir()
    pq.write_table(requests, path / "requests.parquet")
    mean = float(requests["click"].to_numpy().mean())
    return -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)


def _job(size: StreamSize, folder: Path, address: str | None, **data: Any) -> JobConfig:
    days = {"path": f"{folder}/dt={{day}}/*.parquet", "first": _day(0), "last": _day(size.days - 1)}
    train: dict[str, Any] = {
        "epochs": 1,
        "batch_size": _BATCH,
        "threads": 1 if address else 2,
        "staleness": 0,
        "dense_optimizer": {"kind": "adam", "lr": _DENSE_RATE},
        "row_optimizer": {"kind": "rowwise_adagrad", "lr": _ROW_RATE},
    }
    if address:
        train["checkpoint"] = {"url": str(folder / "saves"), "every_seconds": 3600}
    keys = {"item": size.items, "category": _CATEGORIES}
    lists = {"items": "item", "categories": "category"}
    return validate(
        JobConfig,
        {
            "name": _NAME,
            "data": {
                "format": "parquet",
                "columns": {"label": "click"},
                "shuffle_rows": 0,
                **(data or {"days": days}),
            },
            "features": {
                "user": {"kind": "id", "modulo": size.users},
                **{name: {"kind": "id", "modulo": count} for name, count in keys.items()},
                **{name: {"kind": "sequence", "modulo": keys[target]} for name, target in lists.items()},
            },
            "model": {
                "class": "DIN",
                "min_rows": 1,
                "backend": "ps" if address else "local",
                "args": {
                    "rows": {"user": size.users, **keys},
                    "history": lists,
                    "dim": size.dim,
                    "hidden": [200, 80],
                    "attention": [80, 40],
                },
            },
            "train": train,
            **({"cluster": {"address": address}} if address else {}),
            "publish": {"local": None},
        },
        where="bench stream",
    )


def _in_torch(size: StreamSize, folder: Path, last: int) -> float:
    """Returns the log loss on the timestamp after ``last`` of a model that was trained on those up to it, in torch."""
    files = [f"{folder}/dt={_day(number)}/requests.parquet" for number in range(last + 2)]
    job = _job(size, folder, None, train=files[:-1], test=files[-1:])
    trainer = Trainer(job, group=WorkerGroup(), backend=SameBeginning(job), observer=Silence())
    return trainer.run().test_log_loss
