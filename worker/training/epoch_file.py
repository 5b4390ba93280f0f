"""Keeps the epochs that a run has reported beside its checkpoints, so that a restart reports none of them again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict

from ...proto.checkpoint.folder import Folder
from ...proto.errors import NotFound, SparserowError
from .run_identity import RunIdentity
from .training_report import EpochResult

log = logging.getLogger(__name__)

_FILE = "epochs.json"
_MOST_BYTES = 8 << 20  # enough for 10,000 epochs, which is the most that a job has


class EpochFile:
    """The file with the results of a run's epochs, in the folder of its checkpoints.

    A file that cannot be read or written is logged and otherwise ignored.

    Args:
        url: the URL of the folder.
        identity: the identity of the run; the epochs of another run are ignored.
    """

    def __init__(self, url: str, identity: RunIdentity) -> None:
        self._folder, self._identity = Folder(url), identity

    def read(self) -> dict[int, EpochResult]:
        """Returns the results by the epoch's number; {} when there is no file or it is of another run."""
        try:
            saved = json.loads(self._folder.read_small(_FILE, _MOST_BYTES))
            if saved["run"] != self._identity.name and not self._identity.is_again:
                return {}
            return {result.epoch: result for result in (EpochResult(**each) for each in saved["epochs"])}
        except NotFound:
            return {}
        except (SparserowError, ValueError, TypeError, KeyError) as error:
            log.warning("%s cannot be read, so epochs may be reported again: %s", _FILE, error)
            return {}

    def write(self, results: Iterable[EpochResult]) -> None:
        """Replaces the results in the file."""
        text = json.dumps({"run": self._identity.name, "epochs": [asdict(result) for result in results]})
        try:
            self._folder.make()  # before the first checkpoint there is none
            self._folder.write(_FILE, [text.encode()])
        except SparserowError as error:
            log.warning("%s was not written, so a restart may report epochs again: %s", _FILE, error)
