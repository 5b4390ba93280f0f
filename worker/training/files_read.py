"""What must be read of all data files before the first step, once for all workers and for later starts.

That is where the parts of files lie, for which texts are read, and the items to draw negatives from. The namespace
keeps it in the table ``data.safetensors``; a run that goes on from a checkpoint finds it there as well.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import list_names
from ...proto.checkpoint.urls import absolute
from ...proto.config.job import JobConfig
from ...proto.errors import DataLoss, Fenced, NotFound, SparserowError
from ...proto.names import DATA_TABLE
from ...proto.process.lone_work import lone_work
from ..checkpoint.saved_file import saved_file
from ..data import FeatureSpec, PlannedFile
from ..data.candidates import CandidateSampler, ItemTable
from ..data.sources import feature_set, find_files, item_table, plan_files, spec_of
from ..data.sources.known_files import (
    NOTHING_KNOWN,
    KnownFiles,
    KnownItems,
    KnownPlan,
    files_key,
    items_key,
    known_of,
    plan_key,
)
from ..data.sources.open_reader import Which
from ..data.storage import identity_of
from ..session.lower_rank import from_lower_rank
from ..session.namespace_file import MOST_BYTES, NamespaceFile
from ..session.session_core import SessionCore
from .candidate_items import candidate_sampler
from .process_group import WorkerGroup

_log = logging.getLogger(__name__)
_WHAT = "lines and items of the data files"


@dataclass(frozen=True)
class FilesRead:
    """What all workers of a job share of its files.

    Attributes:
        train, test: the files with their parts.
        spec: the inputs of the model.
        candidates: draws negatives; None: no task has them.
    """

    train: Sequence[PlannedFile]
    test: Sequence[PlannedFile]
    spec: FeatureSpec
    candidates: CandidateSampler | None


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint that a run goes on from."""

    folder: Folder
    name: str


def saved_run(job: JobConfig, resume: str) -> SavedRun | None:
    """Returns the checkpoint that a run goes on from; None: it begins at its beginning.

    Args:
        job: the job.
        resume: "never", "auto", or the name of a checkpoint.
    """
    train = job.train
    if train.elastic is not None and train.elastic.url is not None:
        url: str | None = train.elastic.url
    else:
        url = None if train.checkpoint is None else train.checkpoint.url
    if resume == "never" or url is None:
        return None
    folder = Folder(absolute(url))
    name = next(iter(reversed(list_names(folder))), None) if resume == "auto" else resume
    return None if name is None else SavedRun(folder, name)


class DataFiles:
    """Reads the files of a job as far as no one has done it; every worker of the job has one.

    Args:
        job: the job.
        group: this worker and its peers.
        core: the session of this worker; None: the tables are in this process, and nothing is kept.
        saved: the checkpoint that the run goes on from; None: it begins at its beginning.
    """

    def __init__(
        self, job: JobConfig, group: WorkerGroup, core: SessionCore | None = None, saved: SavedRun | None = None
    ) -> None:
        self._job, self._group, self._core, self._saved = job, group, core, saved
        who = None if core is None else core.identity
        # Workers that began a clock together have its name alike.
        is_apart = who is not None and not group.meets
        self._clock = f"{core.origins[0]}.{who.job_id}.{who.generation}" if core and who and is_apart else ""
        self._joins = who is not None and who.first_step > 0
        self._known: KnownFiles | None = None  # what this worker is to keep

    def read(self) -> FilesRead:
        """Returns what all workers share; each calls it.

        Raises:
            BadLine: a line or row that must be read for it is malformed, and such ones are not skipped.
            NotFound, InvalidArgument, DataLoss, FailedPrecondition: a file cannot be read, or lacks a column.
        """
        if self._group.meets:
            return self._group.share(self._made() if self._group.makes_shared else None, what=_WHAT)  # type: ignore[return-value]
        if self._core is not None and self._saved is None:
            found = from_lower_rank(self._core, self._of_lower_rank, _WHAT)
            if found is not None:
                return self._reading(found, self._clock).files
        made = self._made()
        if self._saved is None:
            self._write()  # the others wait for it, so that a failure must end this worker
        return made

    def keep(self) -> None:
        """Keeps what this worker has read for later starts, once the namespace is the run's own.

        A restore counts the rows of a cluster, so nothing may be kept before it. What cannot be kept is read again.
        """
        try:
            self._write()
        except Fenced:
            raise
        except SparserowError as error:
            _log.warning("%s: they could not be kept, and the next start reads them again: %s", _WHAT, error)

    def _write(self) -> None:
        known, core = self._known, self._core
        if known is None or core is None or not (self._group.meets or core.is_lowest_rank()):
            return
        self._known = None
        file, data = NamespaceFile(core, DATA_TABLE), _fitting(known)
        if _document(file.read, file.where).written() != data:
            file.write(data)

    def _of_lower_rank(self) -> KnownFiles | None:
        known = self._kept()
        return known if known.maker == self._clock else None

    def _kept(self) -> KnownFiles:
        """Returns what the namespace keeps; nothing where it is damaged, as another can be read."""
        if self._core is None:
            return NOTHING_KNOWN
        file = NamespaceFile(self._core, DATA_TABLE)
        with contextlib.suppress(NotFound):  # it was dropped meanwhile
            return _document(file.read, file.where)
        return NOTHING_KNOWN

    def _of_checkpoint(self) -> KnownFiles:
        if self._saved is None or self._core is None:
            return NOTHING_KNOWN
        folder, name, table = self._saved.folder, self._saved.name, f"{self._core.namespace}/{DATA_TABLE}"
        return _document(lambda: saved_file(folder, name, table), f"{folder.url}/{name}")

    def _made(self) -> FilesRead:
        known = self._kept()
        if known is NOTHING_KNOWN:
            known = self._of_checkpoint()
        made = self._reading(known, self._clock if self._joins else "")
        self._known = made.known
        return made.files

    def _reading(self, known: KnownFiles, maker: str) -> _Reading:
        return _Reading(self._job, known, maker, self._clock)


def _fitting(known: KnownFiles) -> bytes:
    """Returns the document, without what makes it larger than a file of a namespace may be."""
    for some in (known, replace(known, items=None)):
        if len(data := some.written()) <= MOST_BYTES:
            return data
    return KnownFiles(known.maker).written()


def _document(read: Callable[[], bytes | None], where: str) -> KnownFiles:
    try:
        data = read()
        return NOTHING_KNOWN if data is None else known_of(data, where)
    except DataLoss as error:
        _log.warning("%s are read again: %s", _WHAT, error)
        return NOTHING_KNOWN


class _Reading:
    """Reads what is not known.

    Args:
        job: the job.
        known: what is known.
        maker: the clock of which no file is looked at anew; "": none.
        clock: the clock of this worker's job.

    Attributes:
        files: what is shared.
        known: what is known now of the job's files.
    """

    def __init__(self, job: JobConfig, known: KnownFiles, maker: str, clock: str) -> None:
        self._job, self._before, self._maker = job, known, maker
        train = self._planned("train", {})
        test = self._planned("test", {each.plan.path: each for each in train})
        plans = tuple(each.plan for each in train)
        self._items: KnownItems | None = None
        candidates = candidate_sampler(job, lambda item, weighted: self._items_of(item, weighted, train))
        spec = spec_of(job.data, plans)
        self.files = FilesRead(plans, tuple(each.plan for each in test), spec, candidates)
        self.known = KnownFiles(clock, {each.plan.path: each for each in (*test, *train)}, self._items)

    def _planned(self, which: Which, others: Mapping[str, KnownPlan]) -> tuple[KnownPlan, ...]:
        """Returns the plans of files, in their order; ``others`` has files that were just planned, by path."""
        paths = find_files(self._job.data, which)
        key = plan_key(self._job.data, paths)
        known = self._before.plans_of(paths, key, maker=self._maker)
        known |= {path: each for path, each in others.items() if each.key == key}
        identities = {path: identity_of(path) for path in paths if path not in known}
        with lone_work.doing(f"lines of the files of data.{which}"):
            planned = plan_files(self._job.data, which, {path: each.plan for path, each in known.items()})
        return tuple(known.get(plan.path) or KnownPlan(plan, key, identities[plan.path]) for plan in planned)

    def _items_of(self, item: str, weighted: bool, train: Sequence[KnownPlan]) -> ItemTable:
        data, plans = self._job.data, tuple(known.plan for known in train)
        features = feature_set(data.features)
        feature = next((each for each in features.features if each.name == item), None)
        key = "" if feature is None else items_key(data, feature, features, weighted=weighted)
        files = files_key(train)
        table = self._before.items_of(key, files, maker=self._maker) if key else None
        if table is None:
            with lone_work.doing("items of the training files"):
                table = item_table(data, item, weighted=weighted, plan=plans)
        self._items = KnownItems(table, key, files) if key else None
        return table
