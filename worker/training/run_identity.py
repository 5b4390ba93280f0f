"""Identifies the run that made a checkpoint, so that no run removes another run's checkpoints unasked."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import list_names, read_manifest
from ...proto.checkpoint.urls import absolute
from ...proto.config.job import JobConfig
from ...proto.errors import DataLoss, FailedPrecondition

_KEY = "run_id"
_UNNAMED = "none"  # torchrun's name for a run that was given no name
ROWS_FOLDER = "rows"  # the folder, within that of the checkpoints, of the saves from which a shard is restored


@dataclass(frozen=True)
class RunIdentity:
    """The identity of one run of a job. All workers of the run share it, also those that join or restart later.

    Attributes:
        name: the name of the run, which its checkpoints carry.
        goes_on: whether the run begins from existing checkpoints, or wrote them before it was restarted.
        overwrites: whether checkpoints of other runs are removed when the run begins.
        is_again: whether a scheduler restarted this process.
    """

    name: str
    goes_on: bool = False
    overwrites: bool = False
    is_again: bool = False

    @staticmethod
    def new(*, resume: str = "never", overwrites: bool = False) -> RunIdentity:
        """Returns the identity of a new run with a random name.

        Args:
            resume: the value of ``sparserow train --resume``.
            overwrites: whether checkpoints of other runs are removed.
        """
        return RunIdentity(secrets.token_hex(8), resume != "never", overwrites)

    @staticmethod
    def of_torchrun(run: str, *, resume: str = "never", overwrites: bool = False) -> RunIdentity:
        """Returns the identity of a run under torchrun, whose agents restart workers with the same run name.

        Args:
            run: torchrun's name of the run.
            resume: the value of ``sparserow train --resume``.
            overwrites: whether checkpoints of other runs are removed.
        """
        is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        name = secrets.token_hex(8) if run == _UNNAMED else f"torchrun {run}"
        goes_on = resume != "never" or (run == _UNNAMED and is_again)
        return RunIdentity(name, goes_on, overwrites, is_again)

    def config(self, job: JobConfig) -> dict[str, Any]:
        """Returns the description of the job and the run that a checkpoint's manifest holds."""
        return {**job.model_dump(mode="json", exclude_unset=True), _KEY: self.name}

    def check_folders(self, job: JobConfig) -> None:
        """Checks that the job's folders have no checkpoints of another run; with ``overwrites``, removes them.

        Raises:
            FailedPrecondition: a folder has such checkpoints; the text names the newest and the remedies.
        """
        if self.goes_on:
            return
        for setting, url in _folders(job):
            folder = Folder(absolute(url))
            others = [name for name in list_names(folder) if not self._made(folder, name)]
            if others and not self.overwrites:
                count = "1 checkpoint" if len(others) == 1 else f"{len(others)} checkpoints"
                raise FailedPrecondition(
                    f"{setting}: {url} has {count} of another run, the newest {others[-1]}; go on from there "
                    "(--resume auto), name another url, or have them removed (--overwrite-checkpoints)"
                )
            for name in reversed(others):  # newest first: later checkpoints may build on earlier ones
                (folder / name).remove()

    def _made(self, folder: Folder, name: str) -> bool:
        try:
            config: Mapping[str, Any] = read_manifest(folder, name).config
        except (DataLoss, FailedPrecondition):  # damaged, or of another program
            return False
        return config.get(_KEY) == self.name


def _folders(job: JobConfig) -> list[tuple[str, str]]:
    checkpoint, elastic = job.train.checkpoint, job.train.elastic
    folders = []
    if checkpoint is not None:
        folders += [("train.checkpoint.url", url) for url in (checkpoint.url, f"{checkpoint.url}/{ROWS_FOLDER}")]
    if elastic is not None and elastic.url is not None:
        folders.append(("train.elastic.url", elastic.url))
    return folders
