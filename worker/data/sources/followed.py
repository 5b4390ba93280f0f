"""A folder that is followed as a source of events: files that are written while a job runs, each read once."""

from __future__ import annotations

import glob
import logging
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....proto.config.stream_config import FollowConfig
from ....proto.errors import NotFound, SparserowError
from ..events import DeadEvent, PartEvents, SourcePart
from ..source import PlannedFile, Source
from ..storage import find_paths, identity_of, is_url

__all__ = ["FollowedFiles"]

_log = logging.getLogger(__name__)
_SETTING = "data.stream.follow.files"


@dataclass
class _OpenFile:
    plan: PlannedFile
    position: int  # of the next sample, by its place among those of all parts
    part: int = 0
    before: int = 0  # the samples of the parts before


class FollowedFiles:
    """Reads files; see :class:`~sparserow.worker.data.events.EventSource`. A part is a file.

    Args:
        config: the files, and when one is whole.
        source: decodes them.
        is_endless: whether files that come later are read; False: the run ends with those that are there first.
    """

    most = 1

    def __init__(self, config: FollowConfig, source: Source, *, is_endless: bool) -> None:
        self._config, self._source, self.is_endless = config, source, is_endless
        self.find_sec = config.every
        self.name = f"files from {re.split(r'[*?[]', config.files, maxsplit=1)[0]}"
        self._seen: dict[str, tuple[str, float]] = {}  # by file that is not whole: what it was like, and since when
        self._listed: set[str] = set()
        self._found: set[str] | None = None
        self._file: _OpenFile | None = None
        self._held: Collection[str] = ()

    def find(self, *, is_begun: bool, done_to: str) -> Sequence[SourcePart]:  # noqa: ARG002 - each file begins at 0
        """Returns the whole files behind ``done_to``."""
        try:
            paths = find_paths((self._config.files,), _SETTING)
        except NotFound:
            if not glob.has_magic(self._config.files):
                raise
            paths = ()
        late = [path for path in paths if path <= done_to and self._listed and path not in self._listed]
        if late:
            _log.warning(
                "data.stream.follow: %s (%d files) sorts before %s, which was read, and is left out",
                late[0],
                len(late),
                done_to,
            )
        self._listed = set(paths)
        marker = self._config.marker
        candidates = [path for path in paths if path > done_to and os.path.basename(path) != marker]
        if marker is None:
            self._seen = {path: seen for path, seen in self._seen.items() if path in self._listed}
            whole = [path for path in candidates if self._has_settled(path)]
        else:
            whole = [path for path in candidates if self._is_marked(path, marker)]
        if not self.is_endless:
            if self._found is None:
                self._found = set(whole)
            whole = [path for path in whole if path in self._found]
        return [SourcePart(path, 0, is_whole=True) for path in whole]

    def _has_settled(self, path: str) -> bool:
        """Whether a file has not changed for the time that the job names."""
        now = time.time()
        if not is_url(path):
            try:
                return now - os.stat(path).st_mtime >= self._config.age
            except OSError:
                return False
        like = identity_of(path)
        before = self._seen.get(path)
        if before is None or before[0] != like or not like:
            self._seen[path] = like, now
            return self._config.age == 0
        return now - before[1] >= self._config.age

    def _is_marked(self, path: str, marker: str) -> bool:
        beside = f"{path.rpartition('/')[0]}/{marker}"
        try:
            return bool(find_paths((beside,), _SETTING))
        except SparserowError:
            return False

    def open(self, part: str, position: int, end: int | None) -> None:  # noqa: ARG002 - a file is read as a whole
        """Begins to read a file behind some of its samples."""
        plan = self._source.plan(part)
        self._file = _OpenFile(plan, position)
        rows = plan.rows
        while self._file.part < len(rows) and self._file.before + rows[self._file.part] <= position:
            self._file.before += int(rows[self._file.part])
            self._file.part += 1

    def close(self, part: str) -> None:
        """Reads a file no further."""
        if self._file is not None and self._file.plan.path == part:
            self._file = None

    def read(self, most: int, wait_sec: float) -> Sequence[PartEvents]:  # noqa: ARG002 - a part is decoded at once
        """Returns the samples of the next part of the file."""
        file = self._file
        if file is None or file.plan.path in self._held:
            time.sleep(wait_sec)
            return ()
        path, rows = file.plan.path, file.plan.rows
        if file.part >= len(rows):
            return [self._none(file)]
        count = int(rows[file.part])
        decoded = self._source.read(file.plan, file.part)
        good = len(decoded.lines)
        places = np.arange(count)
        reason = "" if decoded.first_bad is None else str(decoded.first_bad)

        def describe(at: int, reason: str) -> DeadEvent:
            return DeadEvent(f"{path}, sample {int(ends[at])}", reason)

        dead = {at: DeadEvent(path, reason) for at in range(good, good + decoded.bad)}
        ends = file.before + 1 + places
        file.part += 1
        file.before += count
        is_end = file.part == len(rows)
        events = PartEvents(path, decoded.lines, places < good, ends, describe, dead, is_end=is_end, tail=file.before)
        _, rest = events.cut(file.position - int(ends[0]) + 1 if len(ends) else 0)
        file.position = file.before
        return [rest]

    def _none(self, file: _OpenFile) -> PartEvents:
        """Returns the end of a file without further samples."""
        path = file.plan.path
        nothing = np.empty(0, np.int64)
        return PartEvents(
            path,
            self._source.none(path),
            nothing.astype(np.bool_),
            nothing,
            lambda _, reason: DeadEvent(path, reason),
            is_end=True,
            tail=max(file.before, file.position),
        )

    def hold(self, parts: Collection[str]) -> None:
        """Reads these files no further until the next call."""
        self._held = parts

    def lags(self) -> Mapping[str, int]:
        """Returns how many samples of the open file are not read yet."""
        return {} if self._file is None else {self._file.plan.path: int(self._file.plan.rows.sum()) - self._file.before}

    def note_settled(self, positions: Mapping[str, int]) -> None:
        """Does nothing: files have no monitors."""

    def bury(self, dead: Sequence[DeadEvent]) -> None:
        """Does nothing: the samples stay in their files, whose places are logged."""
        for event in dead[:1]:
            _log.warning("data.stream: %d samples are left out: %s", len(dead), event.reason or event.place)

    def stop(self) -> None:
        """Does nothing."""
