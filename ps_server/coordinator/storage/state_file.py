"""Saves a coordinator's state in a file, so that ids, route and epochs survive a restart."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from ....proto.checkpoint.local_file import sync_folder
from ....proto.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted


class StateFile:
    """A file with one JSON document, replaced as a whole: after a crash it has the former document or the new one.

    Others than its owner can read neither it nor the lock, as it names every job, host and worker.
    It has a lock (``PATH.lock``) as long as it is open, so that two coordinators cannot share it.

    Args:
        path: the path of the file.

    Raises:
        InvalidArgument: the folder does not exist or cannot be written.
        FailedPrecondition: another process has the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgument(f"--state {path}: the file cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FailedPrecondition(
                f"--state {path}: another coordinator uses the file; stop that coordinator first"
            ) from None

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._lock)

    def load(self) -> Any:
        """Returns the document; None when there is no file yet.

        Raises:
            DataLoss: the file cannot be read, or is not JSON.
        """
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DataLoss(f"--state {self.path}: the file cannot be read: {error}") from None

    def save(self, document: dict[str, Any]) -> None:
        """Replaces the document, which is on disk when this returns.

        Raises:
            ResourceExhausted: the file cannot be written, for example because the disk is full. The former document
                stays.
        """
        temporary = self.path.with_name(self.path.name + ".new")
        try:
            temporary.unlink(missing_ok=True)  # one of another mode may be left
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(document))  # json.dump encodes in Python: 10 times as slow
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise ResourceExhausted(f"--state {self.path}: the file cannot be written: {error.strerror}") from None
