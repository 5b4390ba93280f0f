"""Writes a synthetic click log in Criteo's TSV form, with a planted signal and the score of its generating model.

The generating model is logistic: ``logit = bias + sum of id effects + sum of pair effects + sum of number effects``.

* Ids of column c follow a bounded Zipf law with exponent 1.05 over ``CARDINALITIES[c]`` values. Each id has a normally
  distributed effect, which is weaker in columns of many ids.
* Six pairs of small columns interact through the inner product of 4 hidden factors of each id.
* Numbers are rounded log-normal counts; their effect is linear in ``log(1 + x)``.
* Ids and numbers are missing at random; a missing value has no effect.

On average no model is better than the generating probabilities. Their AUC on the test part is the *Bayes AUC*.
Everything is a pure function of (seed, rows, test_rows).
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ...proto.config.criteo_columns import CRITEO_CATEGORICAL, CRITEO_NUMERIC
from ...proto.errors import not_allowed
from ..metrics.binary import auc, log_loss
from .criteo import COLUMNS

CARDINALITIES = (
    *(100, 500, 100_000, 50_000, 200, 20, 5_000, 300, 3, 20_000, 3_000, 100_000, 2_000),
    *(25, 5_000, 80_000, 10, 2_000, 1_000, 4, 90_000, 15, 15, 30_000, 60, 10_000),
)
ZIPF_EXPONENT = 1.05
_PAIRS = ((0, 1), (4, 5), (7, 13), (16, 18), (21, 22), (8, 24))
_FACTORS = 4
_ID_EFFECTS = ((1_000, 0.5), (10_000, 0.2), (10**9, 0.06))  # (largest number of ids, standard deviation)
_PAIR_EFFECT = 0.25
_NUMBER_EFFECT = 0.20
_BIAS = -1.4
_MISSING_IDS = 0.03
_MISSING_NUMBERS = 0.15
_ROWS_PER_BLOCK = 131_072
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)


@dataclass(frozen=True)
class SyntheticLog:
    """A synthetic click log that was written.

    Attributes:
        train: the path of the training part.
        test: the path of the test part.
        rows: the number of lines of the training part.
        test_rows: the number of lines of the test part.
        bayes_auc: the AUC of the generating probabilities on the test part.
        bayes_log_loss: the log loss of the generating probabilities on the test part, in nats.
        click_rate: the share of positive labels in the test part.
    """

    train: Path
    test: Path
    rows: int
    test_rows: int
    bayes_auc: float
    bayes_log_loss: float
    click_rate: float


@dataclass(frozen=True)
class _Block:
    ids: npt.NDArray[np.int64]  # (n, 26), -1 when missing
    numbers: npt.NDArray[np.float64]  # (n, 13), NaN when missing
    logits: npt.NDArray[np.float64]  # (n)
    labels: npt.NDArray[np.int64]  # (n)


class _GeneratingModel:
    """The planted effects, which are the same for both parts."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng([seed, 0])
        self._id_effects = [random.normal(0, _id_effect(n), n) for n in CARDINALITIES]
        self._factors = {
            column: random.normal(0, 1, (CARDINALITIES[column], _FACTORS)) for pair in _PAIRS for column in pair
        }
        self._number_effects = random.normal(0, _NUMBER_EFFECT, len(CRITEO_NUMERIC))
        self._number_spreads = random.uniform(0.5, 1.5, len(CRITEO_NUMERIC))

    def draw(self, random: np.random.Generator, rows: int) -> _Block:
        """Draws ``rows`` samples."""
        ids = np.stack([_zipf(random, n, rows) for n in CARDINALITIES], axis=1)
        numbers = np.floor(np.exp(random.normal(1.0, self._number_spreads, (rows, len(CRITEO_NUMERIC)))))
        ids[random.random(ids.shape, dtype=np.float32) < _MISSING_IDS] = -1
        numbers[random.random(numbers.shape, dtype=np.float32) < _MISSING_NUMBERS] = np.nan
        logits = self._logits(ids, numbers)
        labels = (random.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int64)
        return _Block(ids, numbers, logits, labels)

    def _logits(self, ids: npt.NDArray[np.int64], numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        logits = np.full(len(ids), _BIAS)
        for column, effects in enumerate(self._id_effects):
            logits += np.where(ids[:, column] >= 0, effects[ids[:, column]], 0.0)
        for a, b in _PAIRS:
            pair = np.einsum("nk,nk->n", self._factors[a][ids[:, a]], self._factors[b][ids[:, b]])
            present = (ids[:, a] >= 0) & (ids[:, b] >= 0)
            logits += np.where(present, _PAIR_EFFECT / _FACTORS**0.5 * pair, 0.0)
        logits += np.nan_to_num((np.log1p(numbers) - 1.3) * self._number_effects).sum(axis=1)
        return logits


def _id_effect(count: int) -> float:
    """Returns the standard deviation of an id's effect in a column of ``count`` ids; rare ids have weaker effects."""
    return next(effect for limit, effect in _ID_EFFECTS if count <= limit)


def _zipf(random: np.random.Generator, count: int, rows: int) -> npt.NDArray[np.int64]:
    """Draws ids in [0, count) from a continuous bounded power law, rounded down.

    The density of x in [1, count + 1) is proportional to x ** -s.
    """
    exponent = 1.0 - ZIPF_EXPONENT
    end = (count + 1.0) ** exponent
    drawn = (1.0 + random.random(rows) * (end - 1.0)) ** (1.0 / exponent)
    ids: npt.NDArray[np.int64] = np.minimum(drawn.astype(np.int64) - 1, count - 1)
    return ids


def _tokens(ids: npt.NDArray[np.int64], column: int) -> pa.Array:
    """Returns the tokens of ids, (n): 8 hexadecimal digits, distinct within the column; empty when missing."""
    value = ids.astype(np.uint32) ^ np.uint32(0x9E3779B9 * (column + 1) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # a bijection of 32 bits, from MurmurHash3
        value = (value ^ (value >> np.uint32(shift))) * np.uint32(factor)
    shifts = np.arange(28, -4, -4, dtype=np.uint32)
    digits = _HEX_DIGITS[(value[:, None] >> shifts) & np.uint32(15)]
    present = ids >= 0
    ends = np.concatenate([[0], np.cumsum(present * 8)]).astype(np.int32)
    return pa.StringArray.from_buffers(
        len(ids), pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(digits[present]))
    )


def _table(block: _Block) -> pa.Table:
    columns = [pa.array(block.labels)]
    for column in range(len(CRITEO_NUMERIC)):
        number = block.numbers[:, column]
        missing = np.isnan(number)
        columns.append(pa.array(np.where(missing, 0, number).astype(np.int64), mask=missing))
    columns += [_tokens(block.ids[:, column], column) for column in range(len(CRITEO_CATEGORICAL))]
    return pa.table(dict(zip(COLUMNS, columns, strict=True)))


def write_click_log(
    folder: Path, *, rows: int, test_rows: int | None = None, seed: int = 0, compress: bool = False
) -> SyntheticLog:
    """Writes ``train.tsv`` and ``test.tsv`` into ``folder``; compressed files have ``.gz`` appended to their names.

    Args:
        folder: the folder, which is made if it does not exist.
        rows: the number of lines of the training part, at least 1.
        test_rows: the number of lines of the test part; None: a tenth of ``rows``, but at least 1,000.
        seed: the seed of the generating model and of both parts.
        compress: whether the files are compressed by gzip.

    Raises:
        InvalidArgument: ``rows`` or ``test_rows`` is below 1, or ``seed`` below 0.
        OSError: the folder cannot be written.
    """
    test_rows = max(1000, rows // 10) if test_rows is None else test_rows
    for name, value, low in (("rows", rows, 1), ("test_rows", test_rows, 1), ("seed", seed, 0)):
        if value < low:
            raise not_allowed(f"write_click_log.{name}", value, f">= {low}")
    folder.mkdir(parents=True, exist_ok=True)
    model = _GeneratingModel(seed)
    suffix = ".tsv.gz" if compress else ".tsv"
    train, test = folder / f"train{suffix}", folder / f"test{suffix}"
    _write(train, model, np.random.default_rng([seed, 1]), rows)
    logits, labels = _write(test, model, np.random.default_rng([seed, 2]), test_rows)
    return SyntheticLog(
        train, test, rows, test_rows, auc(logits, labels), log_loss(logits, labels), float(labels.mean())
    )


def _write(
    path: Path, model: _GeneratingModel, random: np.random.Generator, rows: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    logits, labels = [], []
    options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    opened = gzip.GzipFile(path, "wb", compresslevel=1, mtime=0) if path.suffix == ".gz" else path.open("wb")
    with cast(BinaryIO, opened) as target:
        for first in range(0, rows, _ROWS_PER_BLOCK):
            block = model.draw(random, min(_ROWS_PER_BLOCK, rows - first))
            pa_csv.write_csv(_table(block), target, options)
            logits.append(block.logits)
            labels.append(block.labels)
    return np.concatenate(logits), np.concatenate(labels)
