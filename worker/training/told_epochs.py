"""Epochs that a run has told, kept beside its checkpoints: a restart tells none of them again."""

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
_MOST_BYTES = 8 << 20  # of 10,000 epochs, which is the most that a job has


class ToldEpochs:
    """The results of a run's epochs, in the folder of its checkpoints. A file that cannot be used is told and left.

    Args:
        url: of the folder.
        identity: of the run; another run's epochs are not its own.
    """

    def __init__(self, url: str, identity: RunIdentity) -> None:
        self._folder, self._identity = Folder(url), identity

    def read(self) -> dict[int, EpochResult]:
        """By number; {} where the file is of another run."""
        try:
            saved = json.loads(self._folder.read_small(_FILE, _MOST_BYTES))
            if saved["run"] != self._identity.name and not self._identity.is_again:
                return {}
            return {result.epoch: result for result in (EpochResult(**each) for each in saved["epochs"])}
        except NotFound:
            return {}
        except (SparserowError, ValueError, TypeError, KeyError) as error:
            log.warning("%s: cannot be read, so epochs may be told again: %s", _FILE, error)
            return {}

    def write(self, results: Iterable[EpochResult]) -> None:
        """In place of those that were there."""
        text = json.dumps({"run": self._identity.name, "epochs": [asdict(result) for result in results]})
        try:
            self._folder.write(_FILE, [text.encode()])
        except SparserowError as error:
            log.warning("%s: was not written, so a restart may tell epochs again: %s", _FILE, error)
