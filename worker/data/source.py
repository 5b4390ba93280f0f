"""The seam between the reader and what it reads: files that are planned once, and read in parts.

A *part* is what a source decodes at once: a row group, a stripe, a record batch, or a run of whole lines. Steps to add
a source:

1. Write a class with the methods of :class:`Source` in a file of ``worker/data/sources``.
2. Add its value to ``DataConfig.format``, and its case to ``sources/open_reader.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...proto.errors import InvalidArgument
from .bad_line import BadLine
from .decoded import Lines
from .features import FeatureSpec


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """A file and its parts, as all workers of a job see them. It can be pickled.

    Attributes:
        path: the path or URL of the file.
        rows: the number of samples of each part, (p) int64: lines, or the rows that pass ``data.where``.
        places: where each part lies, (p, k) int64; only the file's source knows what the k numbers mean.
        is_sequential: whether a part is only reached through those before it, as in a compressed text.
    """

    path: str
    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    is_sequential: bool = False


@dataclass(frozen=True)
class DecodedPart:
    """The good samples of a part, in file order, and the number of others.

    Attributes:
        lines: the good samples.
        bad: the number of malformed ones that were skipped.
        first_bad: the first of those; None: there was none.
    """

    lines: Lines
    bad: int = 0
    first_bad: BadLine | None = None


class Source(Protocol):
    """Reads files of one format. An object belongs to one thread at a time."""

    def spec(self, path: str) -> FeatureSpec:
        """Returns the inputs that the model reads from a file, after checking that the file has their columns.

        Raises:
            NotFound, DataLoss: the file cannot be read.
            InvalidArgument: a column is missing or has a type that its role does not allow.
        """

    def plan(self, path: str) -> PlannedFile:
        """Returns the parts of a file.

        Raises:
            NotFound, InvalidArgument, DataLoss: as for :meth:`spec`.
        """

    def read(self, file: PlannedFile, part: int) -> DecodedPart:
        """Decodes one part.

        Raises:
            BadLine: a sample is malformed, and such samples are not skipped.
            NotFound, DataLoss: the file cannot be read, is damaged, or has changed since it was planned.
        """

    def first(self, path: str) -> Lines:
        """Returns the samples at the beginning of a file: those of its first part, or fewer.

        Raises:
            BadLine: one of its samples is malformed.
            NotFound, InvalidArgument, DataLoss: as for :meth:`spec`.
        """

    def none(self, path: str) -> Lines:
        """Returns no samples, with the columns that the features read from a file."""


def no_samples(path: str) -> InvalidArgument:
    """Returns the error for files of which a job reads no sample.

    Args:
        path: the first of them.
    """
    return InvalidArgument(f"{path}: no data lines, or no rows that data.where selects")
