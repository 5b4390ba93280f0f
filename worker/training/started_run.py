"""Begins a run with what another one has learnt, over other files, where inputs, tables or the tower may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import list_names, read_manifest
from ...proto.checkpoint.urls import folder_and_name
from ...proto.config.checkpoint_config import CheckpointConfig
from ...proto.config.elastic_config import ElasticConfig
from ...proto.config.started_config import TOWER
from ...proto.errors import FailedPrecondition, NotFound
from ..api.session import Session
from .model_order import KEY as ORDER, Change, check_rows, check_tower, order_change
from .process_group import WorkerGroup
from .run_restore import FROM, TrainedParts, print_once, restored_parts, worded_for_jobs

_MOST_NAMED = 5
_ON_SERVERS = (
    "with train.dense ps the tower is rows of the servers, whose shapes cannot change; allowed: train.dense ddp, or "
    "the inputs and dims that were"
)


@dataclass(frozen=True)
class RunStart:
    """What a run starts from.

    Attributes:
        config: the section train.checkpoint of the job.
        session: the session of this worker.
        group: this worker and its peers.
        parts: the parts of the trainer.
        run: the description of the run, as manifests have it.
    """

    config: CheckpointConfig
    session: Session
    group: WorkerGroup
    parts: TrainedParts
    run: Mapping[str, Any]

    def take(self, place: str) -> None:
        """Restores rows, tower, optimizers, schedules and counts of steps of another run.

        Tensors of the tower whose shape another set of inputs changes begin anew, and with ``tower`` in
        ``train.checkpoint.accept`` the whole tower does.

        Args:
            place: the folder of its checkpoints, for the newest, or one of them.

        Raises:
            NotFound: there is no checkpoint.
            FailedPrecondition: its inputs, tasks or tables differ by what is not accepted.
            SparserowError: the checkpoint cannot be restored.
        """
        # Workers that are started one by one may have seen an alias at two versions.
        place = self.group.share(place, what="checkpoint to start from")
        folder, name = folder_and_name(place)
        if not name:
            newest = next(iter(reversed(list_names(Folder(folder)))), "") if self.group.makes_shared else ""
            name = self.group.share(newest, what="newest checkpoint to start from")
        if not name:
            raise NotFound(f"train.checkpoint.start_from: {place} has no checkpoint")
        where, saved = f"{folder}/{name}", read_manifest(Folder(folder), name).config
        is_anew = TOWER in self.config.accept
        change = order_change(saved, self.run[ORDER], where, FROM, refuses=not is_anew)
        check_rows(saved, self.run, where, FROM)
        self._check(change, is_anew=is_anew)
        accept = [each for each in self.config.accept if each != TOWER]
        is_same = change.is_none and not self._widens
        with worded_for_jobs(FROM):
            restored = restored_parts(
                self.session, self.parts, folder, name, accept=accept, strict=is_same or is_anew, tower=not is_anew
            )
        self.parts.steps.load_state_dict(restored.extra["steps"])
        print_once(self.session, f"starts from {folder}/{restored.name}, step {restored.step}, over files of its own")
        for words in (*change.said, "the tower begins anew" if is_anew else _said(restored.anew)):
            if words:
                print_once(self.session, words)

    @property
    def _widens(self) -> bool:
        return any(each.endswith(".dim") for each in self.config.accept)

    def _check(self, change: Change, *, is_anew: bool) -> None:
        """Checks that a tensor of the tower with the shape that it had reads what it read."""
        if is_anew or (change.is_none and not self._widens):
            if is_anew and self.parts.optimizer is None:
                raise FailedPrecondition(
                    "train.checkpoint.accept: tower is not possible with train.dense ps, whose tower is rows of the "
                    "servers; allowed: train.dense ddp"
                )
            return
        if self.parts.optimizer is None:
            raise FailedPrecondition(f"{FROM}: {'; '.join(change.said) or 'a wider dim'}: {_ON_SERVERS}")
        if change.removed and (change.added or self._widens):
            raise FailedPrecondition(
                f"{FROM}: {'; '.join(change.said)}: a tensor of the tower may have the shape that it had and read "
                "something else, as some inputs grow and some go; start two runs, one after the other, or let the "
                "tower begin anew (--accept tower)"
            )


def start_rows(session: Session, config: ElasticConfig, run: Mapping[str, Any], *, is_stream: bool) -> bool:
    """Begins an elastic run with the rows of another one, the tower among them, over data of its own.

    Args:
        session: the session of this worker.
        config: the section train.elastic of the job.
        run: the description of the run, as manifests have it.
        is_stream: whether the job reads a stream, whose positions go on.

    Returns:
        False where the run starts from nothing, or the worker joins a job that has begun.

    Raises:
        NotFound: there is no checkpoint.
        FailedPrecondition: its inputs, tasks or tables differ by what is not accepted.
        SparserowError: the checkpoint cannot be restored.
    """
    identity = session.core.identity
    if config.start_from is None or identity is None or identity.first_step > 0 or identity.restores_begun > 0:
        return False
    folder, name = folder_and_name(config.start_from)
    if not list_names(Folder(folder)):
        raise NotFound(f"train.elastic.start_from: {config.start_from} has no checkpoint")
    manifest = read_manifest(Folder(folder), name or None)
    where = f"{folder}/{manifest.name}"
    change = order_change(manifest.config, run[ORDER], where, FROM)
    if not change.is_none:
        raise FailedPrecondition(f"{FROM}: {'; '.join(change.said)}: {_ON_SERVERS}")
    check_rows(manifest.config, run, where, FROM)
    check_tower(manifest.config, run, where, FROM)
    with worded_for_jobs(FROM):
        restored = session.restore(folder, name=name or None, accept=config.accept, other_data=not is_stream)
    data = "with its place in the stream" if is_stream else "over files of its own"
    print_once(session, f"starts from {folder}/{restored.name}, {data}")
    return True


def _said(anew: tuple[str, ...]) -> str:
    if not anew:
        return ""
    shown = ", ".join(anew[:_MOST_NAMED])
    more = f" and {len(anew) - _MOST_NAMED} more" if len(anew) > _MOST_NAMED else ""
    return f"{len(anew)} tensors of the tower begin anew, as their shape is another one: {shown}{more}"
