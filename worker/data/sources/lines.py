"""Lines of text as a source: Criteo's layout, and delimited text with any columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Literal

import numpy as np

from ....proto.errors import DataLoss
from ..bad_line import BadLinePolicy
from ..decoded import Lines
from ..features import FeatureSpec
from ..formats import FileFormat
from ..line_decoder import LineDecoder
from ..line_windows import (
    LinePosition,
    LineWindow,
    header_end,
    is_compressed,
    open_text,
    read_bytes,
    read_runs,
)
from ..source import DecodedPart, PlannedFile
from ..storage import read_range
from .columns import ColumnDecoder


class TextRuns:
    """Reads runs of whole lines at known places. It keeps a compressed file open, since it is inflated in order."""

    def __init__(self) -> None:
        self._inflated: tuple[str, BinaryIO] | None = None

    def read(self, file: PlannedFile, part: int) -> LineWindow:
        """Returns the lines of a part.

        Raises:
            NotFound, DataLoss: the file cannot be read, or is shorter than when it was planned.
        """
        offset, size, line = (int(value) for value in file.places[part])
        text = self._text(file, offset, size)
        lines = int(file.rows[part])
        window = LineWindow(file.path, LinePosition(offset, line), text, lines)
        if len(text) != size or text.count(b"\n") + (not text.endswith(b"\n")) != lines:
            raise changed(file.path)
        return window

    def _text(self, file: PlannedFile, offset: int, size: int) -> bytes:
        if not file.is_sequential:
            return read_range(file.path, offset, size)
        if self._inflated is None or self._inflated[0] != file.path:
            if self._inflated is not None:
                self._inflated[1].close()
            self._inflated = (file.path, open_text(file.path))
        source = self._inflated[1]
        source.seek(offset)
        return read_bytes(source, file.path, size)


def plan_runs(path: str, begin: LinePosition) -> PlannedFile:
    """Returns the runs of lines of a file as its parts, after reading it once; runs of blank lines are left out.

    Raises:
        NotFound, InvalidArgument, DataLoss: the file cannot be read.
    """
    runs = [
        (run.lines, run.place.offset, len(run.text), run.place.line)
        for run in read_runs(path, begin)
        if not run.text.isspace()
    ]
    numbers = np.array(runs, dtype=np.int64).reshape(len(runs), 4)
    return PlannedFile(path, numbers[:, 0].copy(), numbers[:, 1:].copy(), is_sequential=is_compressed(path))


def changed(path: str) -> DataLoss:
    """Returns the error for a file that is not as it was when the job began."""
    return DataLoss(f"{path}: the file has changed since the job began to read it; begin the job again")


class LineSource:
    """Reads files of text; see :class:`~sparserow.worker.data.source.Source`.

    Args:
        format_of: returns the format of a file, after checking that it has the columns of the decoder's roles.
        decoder: makes samples of the decoded fields.
        on_bad_line: "error" raises at a malformed line; "skip" leaves it out and counts it.
    """

    def __init__(
        self, format_of: Callable[[str], FileFormat], decoder: ColumnDecoder, on_bad_line: Literal["error", "skip"]
    ) -> None:
        self._format_of, self._decoder, self._on_bad_line = format_of, decoder, on_bad_line
        self._formats: dict[str, tuple[FileFormat, LineDecoder]] = {}
        self._runs = TextRuns()

    def _of(self, path: str) -> tuple[FileFormat, LineDecoder]:
        if path not in self._formats:
            form = self._format_of(path)
            self._formats[path] = form, LineDecoder(form.layout)
        return self._formats[path]

    def spec(self, path: str) -> FeatureSpec:
        """Returns the inputs that the model reads, after checking that the file has their columns."""
        self._of(path)
        return self._decoder.roles.spec

    def plan(self, path: str) -> PlannedFile:
        """Returns the runs of lines of a file, after reading it once."""
        return plan_runs(path, self._begin(path))

    def read(self, file: PlannedFile, part: int) -> DecodedPart:
        """Decodes a run of lines."""
        return self._decoded(self._runs.read(file, part))

    def first(self, path: str) -> Lines:
        """Returns the samples of the first run of lines of a file."""
        run = next(read_runs(path, self._begin(path), _FIRST_BYTES), None)
        return self.none(path) if run is None else self._decoded(run).lines

    def none(self, path: str) -> Lines:  # noqa: ARG002 - the columns of all files are those of the decoder
        """Returns no samples."""
        return self._decoder.none()

    def _begin(self, path: str) -> LinePosition:
        return header_end(path) if self._of(path)[0].header else LinePosition()

    def _decoded(self, window: LineWindow) -> DecodedPart:
        return self.decode_like(window.path, window)

    def decode_like(self, path: str, window: LineWindow) -> DecodedPart:
        """Decodes lines, which need not be in a file, as those of a file."""
        policy = BadLinePolicy(self._on_bad_line)
        table, numbers = self._of(path)[1].decode(window, policy)
        found = self._decoder.decode(table, window.path, numbers)
        return DecodedPart(found.lines, policy.count + found.bad, policy.first or found.first_bad)


_FIRST_BYTES = 1 << 18
