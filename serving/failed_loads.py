"""Keeps a serving process from reading a version that cannot be loaded over and over: it is tried at growing pauses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..proto.checkpoint.folder import Folder
from ..proto.errors import FailedPrecondition, SparserowError

_FIRST_PAUSE_SEC = 1.0  # each further pause is twice as long
_LONGEST_PAUSE_SEC = 60.0
_now = time.monotonic


@dataclass(frozen=True)
class _Failure:
    text: str
    files: str  # the fingerprint of the files that could not be loaded
    pause: float
    until: float


class FailedLoads:
    """The versions whose last load failed. Only one thread uses it."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, int], _Failure] = {}

    @contextmanager
    def trying(self, model: str, version: int, folder: Folder) -> Iterator[None]:
        """Runs a block that loads a version, unless it failed of the same files a short while ago.

        Args:
            model, version: the model, and the number of its version.
            folder: the folder of the version.

        Raises:
            FailedPrecondition: the pause after the last failure is not over; the text is that of the failure.
        """
        key, files = (model, version), folder.fingerprint()  # before the load, so that no later change is missed
        before = self._failures.get(key)
        if before is not None and before.files != files:
            before = None
        if before is not None and _now() < before.until:
            raise FailedPrecondition(before.text)
        try:
            yield
        except Exception as error:
            pause = _FIRST_PAUSE_SEC if before is None else min(2 * before.pause, _LONGEST_PAUSE_SEC)
            # The text alone is kept: the error would keep the rows that were read, by the frames of its traceback.
            self._failures[key] = _Failure(text_of(error), files, pause, _now() + pause)
            raise
        self._failures.pop(key, None)

    def forget(self, model: str) -> None:
        """Lets each version of a model be tried at once, as when one of its aliases has moved."""
        self._failures = {key: failure for key, failure in self._failures.items() if key[0] != model}


def text_of(error: Exception) -> str:
    """Returns the text of an error for people; one that is not of the taxonomy begins with the name of its class."""
    return str(error) if isinstance(error, SparserowError) else f"{type(error).__name__}: {error}"
