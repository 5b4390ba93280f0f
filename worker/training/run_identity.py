"""Which run a checkpoint is of: one that another run made is not removed without a word."""

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
_UNNAMED = "none"  # what torchrun calls a run that was given no name
ROWS_FOLDER = "rows"  # of the saves that a shard comes back from, in the folder of the checkpoints


@dataclass(frozen=True)
class RunIdentity:
    """One run of a job: all of its workers, also those that come later or are started again.

    Attributes:
        name: that its checkpoints carry.
        goes_on: it begins from the checkpoints that are there, or has written them before it was started again.
        overwrites: checkpoints of other runs are removed when it begins.
        is_again: a scheduler started this process again.
    """

    name: str
    goes_on: bool = False
    overwrites: bool = False
    is_again: bool = False

    @staticmethod
    def new(*, resume: str = "never", overwrites: bool = False) -> RunIdentity:
        """A run that no run was before; ``resume`` as of ``sparserow train``."""
        return RunIdentity(secrets.token_hex(8), resume != "never", overwrites)

    @staticmethod
    def of_torchrun(run: str, *, resume: str = "never", overwrites: bool = False) -> RunIdentity:
        """The run that torchrun calls ``run``; its agents start workers again under the same name."""
        is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        name = secrets.token_hex(8) if run == _UNNAMED else f"torchrun {run}"
        goes_on = resume != "never" or (run == _UNNAMED and is_again)
        return RunIdentity(name, goes_on, overwrites, is_again)

    def config(self, job: JobConfig) -> dict[str, Any]:
        """What a checkpoint says of its job and run."""
        return {**job.model_dump(mode="json", exclude_unset=True), _KEY: self.name}

    def check_folders(self, job: JobConfig) -> None:
        """Refuses to begin where the job's folders have checkpoints of another run, or removes these.

        Raises:
            FailedPrecondition: they have (names the newest, and what may be done).
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
            for name in reversed(others):  # those that others add to go last
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
