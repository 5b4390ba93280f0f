"""Keeps the model of a job file when its run is over, and names the commands that publish and serve it.

A cluster that the job started ends with it, so rows and program are kept as a version without an alias. The rows of a
running cluster stay there. Then only the program and its features are kept, and ``sparserow publish --program`` with
``--features`` publishes all of it.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.urls import absolute
from ...proto.config.job import JobConfig
from ...proto.errors import SparserowError
from ...proto.published.kept_features import keep_features
from ...proto.published.model_names import DEFAULT_ALIAS, check_name
from ...proto.published.registry import ModelRegistry
from ...proto.security.security import loaded_security
from ...worker.publish.program_export import ProgramSource, export_program
from ...worker.publish.publishing import Publication, Published, publish_program

if TYPE_CHECKING:
    from ...worker.api.session import Session

log = logging.getLogger(__name__)

KEPT_VERSIONS = 3


@dataclass(frozen=True)
class KeptModel:
    """The model that a run leaves.

    Attributes:
        places: lines that say where the model is.
        commands: shell commands by their purpose: publish, serve.
        problem: why the model was not published as the job says; "": it was, or the job has no ``publish.root``.
    """

    places: tuple[str, ...] = ()
    commands: dict[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class TrainedModel:
    """A model at the end of its run.

    Args:
        session: the session with the cluster that has the rows.
        source: the model to export.
        card: the card of its version.
        features: the files of its features by name; none: it takes tensors.
    """

    session: Session
    source: ProgramSource
    card: dict[str, Any]
    features: dict[str, bytes] = field(default_factory=dict)


def keep_model(job: JobConfig, trained: TrainedModel) -> KeptModel:
    """Publishes the model when the job has a ``publish.root``; otherwise keeps it in the folder ``publish.local``.

    A model that cannot be published is kept as well, because its cluster may end with this run; the result has the
    problem. When the default folder cannot be used, the result says so in its places, because the run itself succeeded.

    Raises:
        SparserowError: the model cannot be written, and the job names ``publish.local`` and no ``publish.root``.
    """
    root, local = job.publish.root, job.publish.local
    if root is None:
        return KeptModel() if local is None else _kept(job, trained, local)
    try:
        return _published(job, trained, root)
    except (SparserowError, OSError) as error:
        log.error("the model could not be published to %s: %s", root, error)
        problem = f"publish.root {root}: the model could not be published: {error}"
    kept = KeptModel(("nowhere, as publish.local is null",)) if local is None else _kept(job, trained, local)
    return replace(kept, problem=problem)


def publish_running(
    job: JobConfig, trained: Callable[[], TrainedModel], progress: Callable[[int], None] | None
) -> None:
    """Publishes the model of a run that goes on, and removes versions beyond ``publish.keep``; a failure is logged.

    Args:
        job: the job, which has a ``publish.root``.
        trained: returns the model of now.
        progress: called with the number of rows written so far; None: not called.
    """
    wanted = job.publish
    assert wanted.root is not None
    try:
        name = wanted.model or job.name
        done = _publish(job, trained(), Publication(name, wanted.root, wanted.alias, wanted.dtype), progress)
        log.info("published %s@%d while the run goes on", name, done.version)
        ModelRegistry(absolute(wanted.root)).prune(name, wanted.keep)
    except (SparserowError, OSError) as error:
        log.warning("no version was published to %s; the run goes on: %s", wanted.root, error)


def _kept(job: JobConfig, trained: TrainedModel, folder: str) -> KeptModel:
    try:
        return _version(job, trained, folder) if job.cluster.address is None else _program(job, trained, folder)
    except (SparserowError, OSError) as error:
        if "local" in job.publish.model_fields_set and job.publish.root is None:
            raise
        log.warning("the model could not be kept: %s", error)
        return KeptModel((f"nowhere, as {absolute(folder)} cannot be used: {error}",))


def _published(job: JobConfig, trained: TrainedModel, folder: str) -> KeptModel:
    wanted = job.publish
    name, root = wanted.model or job.name, absolute(folder)
    done = _publish(job, trained, Publication(name, folder, wanted.alias, wanted.dtype))
    alias = f" ({wanted.alias})" if wanted.alias is not None else ""
    commands = {} if wanted.alias is not None else {"publish": _alias_command(name, done.version, root)}
    commands["serve"] = _serve_command(name, root, wanted.alias or DEFAULT_ALIAS)
    return KeptModel((f"{name}@{done.version}{alias} in {folder}",), commands)


def _version(job: JobConfig, trained: TrainedModel, folder: str) -> KeptModel:
    root = absolute(folder)
    done = _publish(job, trained, Publication(job.name, root, None))
    ModelRegistry(root).prune(job.name, KEPT_VERSIONS)
    commands = {
        "publish": _alias_command(job.name, done.version, root),
        "serve": _serve_command(job.name, root, DEFAULT_ALIAS),
    }
    return KeptModel((f"{job.name}@{done.version} in {root}",), commands)


def _publish(
    job: JobConfig, trained: TrainedModel, place: Publication, progress: Callable[[int], None] | None = None
) -> Published:
    whole = replace(place, card=trained.card, program=trained.source, features=trained.features, sign=job.publish.sign)
    return publish_program(trained.session, whole, progress)


def _program(job: JobConfig, trained: TrainedModel, folder: str) -> KeptModel:
    root, name = absolute(folder), check_name("name", job.name)
    trained.session.flush()
    tower = trained.session.core.read_dense_rows()
    is_signed = bool(loaded_security(None).signing_key)
    program = export_program(trained.source, is_signed=is_signed)
    place = Folder(root)
    place.make()
    file, kept = f"{name}.program.pt2", f"{name}.features"
    keep_features(place / kept, trained.features, program.archive)
    place.put(file, program.archive)
    path = f"{root}/{file}"
    words = ["sparserow", "publish", name, "--root", root, "--namespace", job.name, "--program", path]
    words += ["--features", f"{root}/{kept}"] if trained.features else []
    words += [] if job.publish.sign is None else ["--sign", str(job.publish.sign)]
    words += ["--coordinator", str(job.cluster.address), *([] if tower is None else ["--without", tower])]
    commands = {"publish": shlex.join(words), "serve": _serve_command(name, root, DEFAULT_ALIAS)}
    return KeptModel((f"its program in {path}",), commands)


def _alias_command(name: str, version: int, root: str) -> str:
    return shlex.join(["sparserow", "alias", f"{name}@{DEFAULT_ALIAS}", str(version), "--root", root])


def _serve_command(name: str, root: str, alias: str) -> str:
    model = name if alias == DEFAULT_ALIAS else f"{name}@{alias}"
    return shlex.join(["sparserow", "serve", "--root", root, "--model", model])
