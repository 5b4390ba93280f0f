"""The checkpoint that a published version was learnt with, for a run that starts from ``NAME@WHICH``."""

from __future__ import annotations

import logging

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import list_names
from ...proto.checkpoint.urls import absolute
from ...proto.config.job import JobConfig
from ...proto.errors import InvalidArgument, NotFound, SparserowError
from ...proto.published.model_names import parse_model
from ...proto.published.registry import ModelRegistry
from ...proto.security.security import loaded_security

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"  # in the card of a version


def newest_checkpoint(job: JobConfig) -> str | None:
    """Returns the URL of the newest checkpoint of a job; None: it has none, or the folder cannot be read."""
    saves = job.train.checkpoint or job.train.elastic
    if saves is None or saves.url is None:
        return None
    url = absolute(saves.url)
    try:
        names = list_names(Folder(url))
    except (SparserowError, OSError) as error:
        log.warning("the card of the version names no checkpoint: %s", error)
        return None
    return f"{url}/{names[-1]}" if names else None


def with_known_start(job: JobConfig) -> JobConfig:
    """Returns a job whose start is a checkpoint, where it was a published version, as ``ctr@live``.

    Args:
        job: the job; a start without "@", or with a folder in it, is a place already.

    Raises:
        InvalidArgument: the job has no ``publish.root``, where the version would be.
        NotFound: there is no such model, alias or version; or it was published without a checkpoint.
        SparserowError: the version cannot be read, or is not signed as this machine wants it.
    """
    section = "checkpoint" if job.train.checkpoint is not None else "elastic"
    saves = job.train.checkpoint or job.train.elastic
    if saves is None or saves.start_from is None:
        return job
    start, setting = saves.start_from, f"train.{section}.start_from"
    if "@" not in start or "/" in start:
        return job
    if job.publish.root is None:
        raise InvalidArgument(
            f"{setting}: {start} is a published version, and the job has no publish.root to find it "
            f"in; allowed: publish.root, or a folder (./{start})"
        )
    model, which = parse_model(start)
    registry = ModelRegistry(absolute(job.publish.root))
    version = registry.resolve(model, which).version
    place = registry.trusted_manifest(model, version, loaded_security(None)).card.get(CHECKPOINT)
    if not isinstance(place, str) or not place:
        raise NotFound(
            f"{setting}: {start} is version {version}, which was published without a checkpoint; "
            "name the folder of a run's checkpoints"
        )
    known = type(saves)(**{**saves.model_dump(exclude_unset=True), "start_from": place})
    return job.model_copy(update={"train": job.train.model_copy(update={section: known})})
