"""Writes a synthetic log of clicks and purchases with histories as Parquet, with the best scores possible on it.

Items have kinds: item i is of kind ``i % KINDS``. Each user likes two kinds, which its history shows.

* A history is a walk: with the probability FOLLOWS the item behind i is its *successor* ``i + KINDS``, of the same
  kind; otherwise it is a random item of a kind that the user likes. Lengths are Poisson.
* A sample's item is of a liked kind in half of the samples. It is clicked with the probability LIKED or OTHER, and the
  logit of that falls with the price. A clicked item is bought more often when it is cheap.
* The ``next`` item is the successor of the history's last one with the probability FOLLOWS; it stands at ``position``
  among the candidates, whose others are random.

The columns are those of the job files of the zoo (deploy/jobs). On average no model of clicks and purchases is better
than the generating probabilities. Everything is a pure function of the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ...proto.errors import not_allowed
from ...proto.features.jagged import offsets_of
from ..metrics.binary import auc

KINDS = 8
FOLLOWS = 0.9
LIKED, OTHER = 0.6, 0.1
_ROWS_PER_GROUP = 20_000
_SECOND = 1_700_000_000  # of the first sample, Unix time


@dataclass(frozen=True)
class SalesLog:
    """A synthetic log of sales that was written.

    Attributes:
        train: the path of the training part.
        test: the path of the test part.
        rows: the number of samples of the training part.
        test_rows: the number of samples of the test part.
        click_auc: the AUC of the generating probabilities of clicks on the test part.
        buy_auc: that of purchases.
        hit_rate: the share of samples of the test part whose next item is the successor, which is the hit rate at 1 of
            that rule, but for chance.
    """

    train: Path
    test: Path
    rows: int
    test_rows: int
    click_auc: float
    buy_auc: float
    hit_rate: float


@dataclass(frozen=True)
class _Sizes:
    users: int
    items: int
    history: int
    candidates: int


def write_sales_log(
    folder: Path,
    *,
    rows: int,
    test_rows: int | None = None,
    users: int = 10_000,
    items: int = 2_000,
    history: int = 50,
    candidates: int = 20,
    seed: int = 0,
) -> SalesLog:
    """Writes the parts ``sales_train.parquet`` and ``sales_test.parquet``.

    The columns are user, item, next (int64), history, candidates (lists of int64), position (int64), age, price
    (float64), at (timestamp), click and buy (int8).

    Args:
        folder: the folder, which is made when it does not exist.
        rows: the number of samples of the training part.
        test_rows: that of the test part; None: a tenth of ``rows``, at least 1.
        users: the number of users.
        items: the number of items, at least 2 for each kind.
        history: the mean length of a history.
        candidates: the number of candidates of a sample.
        seed: the seed.

    Raises:
        InvalidArgument: a size is too small.
    """
    for name, value, least in (
        ("rows", rows, 1),
        ("test_rows", 1 if test_rows is None else test_rows, 1),
        ("users", users, 1),
        ("items", items, 2 * KINDS),
        ("history", history, 0),
        ("candidates", candidates, 2),
        ("seed", seed, 0),
    ):
        if value < least:
            raise not_allowed(f"write_sales_log.{name}", value, f">= {least}")
    sizes, tested = _Sizes(users, items, history, candidates), max(1, rows // 10) if test_rows is None else test_rows
    folder.mkdir(parents=True, exist_ok=True)
    train, test = folder / "sales_train.parquet", folder / "sales_test.parquet"
    _write(train, rows, sizes, [seed, 0])
    truths = _write(test, tested, sizes, [seed, 1])
    clicks, purchases, of_click, of_purchase, follows = (np.concatenate(each) for each in zip(*truths, strict=True))
    return SalesLog(
        train,
        test,
        rows,
        tested,
        auc(of_click, clicks),
        auc(of_purchase, purchases),
        float(follows.mean()),
    )


def _write(path: Path, rows: int, sizes: _Sizes, seeds: list[int]) -> list[tuple[npt.NDArray[Any], ...]]:
    """Writes a part, and returns (clicks, purchases, their probabilities, whether the next item follows) by group."""
    truths = []
    writer: pq.ParquetWriter | None = None
    try:
        for group, first in enumerate(range(0, rows, _ROWS_PER_GROUP)):
            random = np.random.default_rng([*seeds, group])
            table, truth = _group(random, min(_ROWS_PER_GROUP, rows - first), first, sizes)
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=len(table))
            truths.append(truth)
    finally:
        if writer is not None:
            writer.close()
    return truths


def _group(
    random: np.random.Generator, rows: int, first: int, sizes: _Sizes
) -> tuple[pa.Table, tuple[npt.NDArray[Any], ...]]:
    user = random.integers(0, sizes.users, rows)
    likes = np.stack([user % KINDS, (user // KINDS + user % KINDS + 1) % KINDS], axis=1)
    lengths = random.poisson(sizes.history, rows)
    walks = _walks(random, likes, int(lengths.max(initial=0)) + 1, sizes.items)
    there = np.arange(walks.shape[1]) < lengths[:, None]
    last = np.take_along_axis(walks, np.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    follows = (random.random(rows) < FOLLOWS) & (lengths > 0)
    target = np.where(follows, (last + KINDS) % _whole(sizes.items), random.integers(0, sizes.items, rows))
    position = random.integers(0, sizes.candidates, rows)
    candidates = random.integers(0, sizes.items, (rows, sizes.candidates))
    candidates[np.arange(rows), position] = target
    is_liked = random.random(rows) < 0.5
    item = np.where(is_liked, _liked(random, likes, sizes.items), random.integers(0, sizes.items, rows))
    price = np.round(random.lognormal(2.0, 0.7, rows), 2)
    likes_it = (item[:, None] % KINDS == likes).any(axis=1)
    logits = np.log(np.where(likes_it, LIKED / (1 - LIKED), OTHER / (1 - OTHER))) - 0.5 * (np.log(price) - 2.0)
    of_click = 1 / (1 + np.exp(-logits))
    click = random.random(rows) < of_click
    of_purchase = 1 / (1 + np.exp(1.5 * (np.log(price) - 2.0) + 0.5))
    buy = click & (random.random(rows) < of_purchase)
    table = pa.table(
        {
            "user": user,
            "item": item,
            "history": pa.LargeListArray.from_arrays(offsets_of(lengths.astype(np.int64)), walks[there]),
            "candidates": pa.FixedSizeListArray.from_arrays(candidates.ravel(), sizes.candidates).cast(
                pa.large_list(pa.int64())
            ),
            "next": target,
            "position": position,
            "age": random.integers(18, 80, rows).astype(np.float64),
            "price": price,
            "at": pa.array((_SECOND + first + np.arange(rows)).astype("datetime64[s]")),
            "click": click.astype(np.int8),
            "buy": buy.astype(np.int8),
        }
    )
    return table, (click, buy, of_click, of_click * of_purchase, follows)


def _whole(items: int) -> int:
    """Returns the number of items whose successors, in a ring, are of their kind."""
    return items - items % KINDS


def _liked(random: np.random.Generator, likes: npt.NDArray[np.int64], items: int) -> npt.NDArray[np.int64]:
    """Returns a random item of a liked kind for each user."""
    kind = np.take_along_axis(likes, random.integers(0, 2, (len(likes), 1)), axis=1)[:, 0]
    drawn: npt.NDArray[np.int64] = random.integers(0, items // KINDS, len(likes)) * KINDS + kind
    return drawn


def _walks(random: np.random.Generator, likes: npt.NDArray[np.int64], length: int, items: int) -> npt.NDArray[np.int64]:
    """Returns walks over items, (n, length)."""
    walks = np.empty((len(likes), length), dtype=np.int64)
    for step in range(length):
        walks[:, step] = _liked(random, likes, items)
        if step:
            follows = random.random(len(likes)) < FOLLOWS
            walks[follows, step] = (walks[follows, step - 1] + KINDS) % _whole(items)
    return walks
