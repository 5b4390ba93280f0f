"""Saves the checkpoints of a trainer when they are due, and resumes the trainer from one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import list_names, read_manifest
from ...proto.config.checkpoint_config import CheckpointConfig
from ...proto.errors import FailedPrecondition, Fenced, SparserowError
from ..api.session import Session
from ..checkpoint import SavedCheckpoint
from ..checkpoint.restore import check_reader
from ..checkpoint.save import absolute
from ..data.stream_reader import StreamReader
from .model_order import KEY as ORDER, check_order, check_rows, check_tower
from .parallel_group import ParallelGroup
from .process_group import WorkerGroup
from .run_identity import ROWS_FOLDER
from .run_restore import TrainedParts, print_once, restored_parts, worded_for_jobs
from .started_run import RunStart

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The position of a run in its epochs.

    Attributes:
        epoch: the present epoch, from 1; larger than the number of epochs when the run is done.
        is_trained: whether all batches of the present epoch are done, so that only its evaluation is left.
        samples: the number of samples that this worker has trained on in the present epoch; where the number of
            workers has changed within it, worker 0 has those of all before.
        joined: how many of them are those of all workers before that change.
        loss_sum: the sum of their losses.
        seconds: the seconds that this worker has spent on them.
        history: the results of the epochs before, as dicts.
        points: the results of all tests within epochs, as dicts.
        is_tested: whether the last of them is of the model of now.
    """

    epoch: int = 1
    is_trained: bool = False
    samples: int = 0
    joined: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    is_tested: bool = False

    def begin_epoch(self, epoch: int) -> None:
        """Moves to the first batch of ``epoch``."""
        self.epoch, self.is_trained, self.is_tested = epoch, False, False
        self.samples, self.joined, self.loss_sum, self.seconds = 0, 0, 0.0, 0.0

    def samples_of_all(self, world: int) -> int:
        """Returns the samples of all workers in the present epoch, as worker 0 estimates them by its own."""
        return self.joined + (self.samples - self.joined) * world

    def join(self, others: Sequence[Progress], *, is_first: bool) -> None:
        """Takes over the sums of all workers of a run that had another number of them.

        Args:
            others: the progress of each of those workers.
            is_first: whether this worker is the first one, which has the sums of samples and losses then.
        """
        self.is_trained = all(other.is_trained for other in others)
        self.samples = self.joined = sum(other.samples for other in others) if is_first else 0
        self.loss_sum = sum(other.loss_sum for other in others) if is_first else 0.0
        self.seconds = max(other.seconds for other in others)


def resume_rows(session: Session, url: str, name: str | None, run: Mapping[str, Any]) -> bool:
    """Restores a save of the rows, and the position in the epoch from which the coordinator leases data.

    Every worker of the job calls it.

    Args:
        session: the session of this worker.
        url: the URL of the folder of the saves.
        name: the name of the save; None: the newest.
        run: the description of the run, as manifests have it.

    Returns:
        False when ``name`` is None and there is no save.

    Raises:
        FailedPrecondition: inputs, tasks, the tower or the rows of a table differ.
        SparserowError: the save cannot be restored.
    """
    folder = Folder(absolute(url))
    if name is None and not list_names(folder):
        return False
    manifest = read_manifest(folder, name)
    where = f"{url}/{manifest.name}"
    check_order(manifest.config, run[ORDER], where)
    check_rows(manifest.config, run, where)
    check_tower(manifest.config, run, where, "--resume")
    with worded_for_jobs():
        restored = session.restore(url, name=name)
    print_once(session, f"resumed from {url}/{restored.name}, with its rows and its place in the data")
    return True


class TrainingCheckpoints:
    """Saves checkpoints by steps or time. When a save fails, the failure is logged and the job goes on.

    Args:
        config: the section train.checkpoint of the job, with the times and the place of saves.
        session: the session of this worker.
        group: this worker and its peers.
        parts: the parts to save besides the rows.
        run: the description of the job and its run in the manifests, for ``sparserow checkpoint inspect``.

    Attributes:
        resumed: the name of the checkpoint that the run goes on from; None: it began at its beginning.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        session: Session,
        group: WorkerGroup,
        parts: TrainedParts,
        run: dict[str, Any],
    ) -> None:
        self._config, self._session, self._group, self._parts, self._run = config, session, group, parts, run
        self._url = absolute(config.url)
        self._saved_at = time.monotonic()
        self._writing: SavedCheckpoint | None = None
        self.resumed: str | None = None

    def begin(self) -> None:
        """Is called before the first step: starts saves of rows between checkpoints.

        There are such saves only when the job asks for them and a shard can be restored from them while others go on.
        """
        every = self._config.delta_every
        if every is not None and self._session.core.placement.staleness != 0:
            self._session.keep_rows(f"{self._url}/{ROWS_FOLDER}", every_sec=every, config=self._run)

    def after_step(self, number: int, progress: Progress) -> None:
        """Saves a checkpoint when one is due.

        Args:
            number: the number of steps of the whole run so far.
            progress: the position of the run.
        """
        if self._is_due(number):
            self._save(progress, wait=False)

    def at_end(self, progress: Progress) -> None:
        """Saves the last checkpoint, which holds the trained model, and waits until it is written."""
        self._save(progress, wait=True)

    @property
    def folder(self) -> Folder:
        """The folder of the checkpoints."""
        return Folder(self._url)

    def save_now(self, progress: Progress) -> str | None:
        """Saves a checkpoint, and waits until it is written; returns its name, or None when the save failed."""
        saved = self._save(progress, wait=True)
        return None if saved is None else saved.name

    def load(self, name: str) -> None:
        """Sets the rows of the job's namespace and the model back to a checkpoint of this run.

        The optimizer and the position stay as they are, and so do the rows of other namespaces of the cluster. A table
        that is newer than the checkpoint is emptied.

        Raises:
            SparserowError: the checkpoint cannot be restored.
        """
        self._session.restore(self._url, name=name, model=self._parts.model)

    def go_back(self, steps: int) -> str | None:
        """Sets rows, model, optimizers and schedules back to a checkpoint; the data goes on.

        Args:
            steps: the number of last steps that the checkpoint is without; the newest such one is taken.

        Returns:
            The name of the checkpoint; None: there is none, and nothing has changed.

        Raises:
            SparserowError: the checkpoint cannot be restored.
        """
        if self._writing is not None:
            with contextlib.suppress(SparserowError):
                self._writing.wait()
        found: str | None = None
        if self._group.makes_shared:
            names = reversed(list_names(Folder(self._url)))
            manifests = ((name, read_manifest(Folder(self._url), name)) for name in names)
            last = self._session.current_step - 1 - steps
            found = next((name for name, manifest in manifests if manifest.step <= last), None)
        name = self._group.share(found, what="newest checkpoint")
        if name is None:
            return None
        restored_parts(self._session, self._parts, self._url, name)
        return name

    def _check_workers(self, name: str) -> None:
        """Checks, before a row is changed, that the workers of this run can go on from a checkpoint.

        Raises:
            FailedPrecondition: the checkpoint lacks the state of a worker, or is of another number of workers, and the
                job has towers in parts; or its model has inputs or tasks in another order.
            InvalidArgument: the position in the data is of other files, another order or another version.
        """
        folder = Folder(self._url)
        if name not in list_names(folder):
            return  # the restore raises an error that lists the checkpoints
        manifest = read_manifest(folder, name)
        check_order(manifest.config, self._run[ORDER], f"{self._url}/{name}")
        check_rows(manifest.config, self._run, f"{self._url}/{name}")
        saved, world = {worker.rank for worker in manifest.workers}, self._group.world
        if not saved:
            return
        ranks = ", ".join(map(str, sorted(saved)))
        if saved != set(range(world)) and isinstance(self._group, ParallelGroup):
            raise FailedPrecondition(
                f"--resume: {self._url}/{name} has the state of ranks {ranks}, and this run has {world} workers with "
                f"towers in parts (train.parallel); allowed: {max(saved) + 1} workers"
            )
        if saved != set(range(max(saved) + 1)):
            raise FailedPrecondition(
                f"--resume: {self._url}/{name} has the state of ranks {ranks} alone, so the position of the other "
                "workers is not known; name another checkpoint"
            )
        check_reader(self._parts.reader, folder, manifest, self._group.rank)

    def _is_due(self, number: int) -> bool:
        config = self._config
        if config.every_steps is not None and number % config.every_steps == 0:
            return True
        if config.every_seconds is None:
            return False
        return self._group.share(time.monotonic() - self._saved_at >= config.every_seconds)

    def _save(self, progress: Progress, *, wait: bool) -> SavedCheckpoint | None:
        parts = self._parts
        try:
            if self._writing is not None:
                self._writing.wait()
        except SparserowError as error:
            log.warning("the last checkpoint was not written: %s", error)
        self._writing = None
        try:
            self._writing = self._session.save(
                self._url,
                model=parts.model,
                optimizer=parts.optimizer,
                scaler=parts.scaler,
                scheduler=parts.schedule,
                reader=parts.reader,
                extra={
                    "progress": vars(progress),
                    "steps": parts.steps.state_dict(),
                    "progressive": None if parts.progressive is None else parts.progressive.state_dict(),
                },
                config=self._run,
                keep=self._config.keep,
                full_every=self._config.full_every,
                wait=wait,
            )
        except Fenced:
            raise  # this worker has lost its place in the job and cannot go on
        except SparserowError as error:
            log.warning("no checkpoint was made: %s", error)
        self._saved_at = time.monotonic()
        return self._writing

    def newest(self) -> str | None:
        """Returns the newest checkpoint that has the state of at least as many workers as this run has.

        When no checkpoint has it, returns the newest of all. Returns None when there is no checkpoint.
        """
        folder = Folder(self._url)
        names, ranks = list_names(folder), set(range(self._group.world))
        for name in reversed(names):
            if ranks <= {worker.rank for worker in read_manifest(folder, name).workers}:
                return name
        return names[-1] if names else None

    @property
    def run_start(self) -> RunStart:
        """Begins the run with what another one has learnt."""
        return RunStart(self._config, self._session, self._group, self._parts, self._run)

    def resume(self, name: str | None) -> Progress | None:
        """Restores a checkpoint.

        Args:
            name: the name of the checkpoint; None: the newest, if there is one.

        Returns:
            The position of the run; None when ``name`` is None and there is no checkpoint.

        Raises:
            SparserowError: the checkpoint cannot be restored.
        """
        parts = self._parts
        if name is None:
            name = self._group.share(self.newest() if self._group.makes_shared else None, what="newest checkpoint")
        if name is None:
            print_once(self._session, f"no checkpoint is in {self._url} to go on from: the run begins at its beginning")
            return None
        self._check_workers(name)
        with worded_for_jobs():
            restored = restored_parts(self._session, self._parts, self._url, name, reader=parts.reader)
        parts.steps.load_state_dict(restored.extra["steps"])
        progress = Progress(**restored.extra["progress"])
        if restored.extras:
            progress.join([Progress(**extra["progress"]) for extra in restored.extras], is_first=self._group.rank == 0)
        windows = [extra["progressive"] for extra in restored.extras or (restored.extra,)]
        if parts.progressive is not None and None not in windows:  # else the run before had none
            parts.progressive.load_state_dicts(windows)
        where = (
            f"in epoch {progress.epoch}" if not progress.is_trained else f"in the evaluation of epoch {progress.epoch}"
        )
        if isinstance(parts.reader, StreamReader):
            where = "with its place in the stream"
        print_once(self._session, f"resumed from {self._url}/{restored.name}, step {restored.step}, {where}")
        self.resumed = restored.name
        return progress
