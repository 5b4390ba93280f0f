"""The features of a run and those that its namespace keeps: which ones count, and how all workers get the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch.distributed as dist

from ...proto.errors import DataLoss, FailedPrecondition, SparserowError, not_allowed
from ...proto.features.feature_set import FeatureSet
from ...proto.features.kept import NOTHING_KEPT, FeaturesPolicy, KeptFeatures, kept_of
from ...proto.names import FEATURES_TABLE
from ...proto.process.lone_work import lone_work
from .lower_rank import from_lower_rank
from .namespace_file import NamespaceFile
from .rank_beats import give_signs, meet
from .session_parts import NamespaceCore

Fit: TypeAlias = Callable[[FeatureSet], FeatureSet]

_log = logging.getLogger(__name__)
_MOST_NAMED = 5


def kept_features(core: NamespaceCore) -> KeptFeatures:
    """Returns the features that the namespace of a session keeps.

    Raises:
        DataLoss: the document is damaged.
    """
    file = NamespaceFile(core, FEATURES_TABLE)
    data = file.read()
    return NOTHING_KEPT if data is None else kept_of(data, file.where)


def agreed_features(
    core: NamespaceCore, features: FeatureSet, fit: Fit, *, policy: FeaturesPolicy = "keep"
) -> FeatureSet:
    """Returns features with the statistics that their namespace keeps, on every worker of a job, which all call it.

    Those that it does not keep yet are learnt by one worker: rank 0 where the workers have a process group, and else
    the lowest rank in the job, for which the others wait as long as it is there.

    Args:
        core: the session of this worker.
        features: the features, which may lack statistics.
        fit: returns the features that it is given with statistics; some of them may have theirs.
        policy: "keep": features that differ from those of an earlier run are refused. "refit": they take their place,
            with each call of the job's workers; a worker that joins a running job keeps what is there.

    Raises:
        FailedPrecondition: a feature differs from that of an earlier run, or of another worker; the text names it.
        InvalidArgument: ``policy`` is none.
        DeadlineExceeded: the worker that learns them gave no sign of life.
        DataLoss: the namespace's document is damaged.
    """
    if policy not in ("keep", "refit"):
        raise not_allowed("features_policy", policy, "keep, refit")
    agreement = _Agreement(core, features, fit, is_refit=policy == "refit")
    meets = core.is_distributed and dist.is_available() and dist.is_initialized()
    kept = _of_first_rank(agreement.made) if meets else agreement.alone()
    return features.with_statistics(kept.statistics_for(features, core.namespace))


def check_kept(core: NamespaceCore, features: FeatureSet) -> None:
    """Checks that features have the statistics and vocabularies that their namespace keeps, if it keeps any.

    Raises:
        FailedPrecondition: a feature differs; the text names it.
        DataLoss: the namespace's document is damaged.
    """
    kept_features(core).statistics_for(features, core.namespace)


def _log_earlier(core: NamespaceCore, features: FeatureSet) -> None:
    """Logs one line where the namespace had statistics before the job, unless a ``namespace_policy`` was given."""
    if core.placement.rank == 0 and FEATURES_TABLE in (core.found_tables or {}):
        learnt = {*features.statistics, *features.vocabularies}
        names = [each.name for each in features.features if each.needs_statistics or each.name in learnt]
        if not names:
            return
        _log.warning(
            "namespace %r: the statistics and vocabularies of %s%s are those of an earlier run "
            "(features_policy='refit' takes this run's)",
            core.namespace,
            ", ".join(names[:_MOST_NAMED]),
            f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "",
        )


def _of_first_rank(made: Callable[[], KeptFeatures]) -> KeptFeatures:
    box: list[KeptFeatures | SparserowError | None] = [None]
    failure: Exception | None = None
    give_signs()
    if dist.get_rank() == 0:
        try:
            box = [made()]
        except SparserowError as error:
            box = [error]
        except Exception as error:  # of the data, say: the others must not wait for ever
            failure = error
            box = [FailedPrecondition(f"features: rank 0 could not learn them: {type(error).__name__}: {error}")]
    meet("features")
    dist.broadcast_object_list(box, src=0)
    (result,) = box
    if failure is not None:
        raise failure
    if isinstance(result, SparserowError):
        raise result
    assert result is not None
    return result


class _Agreement:
    """What :func:`agreed_features` does on one worker."""

    def __init__(self, core: NamespaceCore, features: FeatureSet, fit: Fit, *, is_refit: bool) -> None:
        self._core, self._features, self._fit, self._is_refit = core, features, fit, is_refit
        who = core.identity
        core.refits_begun += is_refit
        # Workers that began a clock together have its name and count alike; with stores of this process there is one.
        self._clock = "" if who is None else f"{who.job_id}.{who.generation}.{core.refits_begun}"
        self._joins = who is not None and who.first_step > 0

    def _read(self) -> tuple[KeptFeatures, bool]:
        """Returns what the namespace keeps, and whether this worker goes by it."""
        try:
            kept = kept_features(self._core)
        except DataLoss:
            if self._is_refit:
                return NOTHING_KEPT, False
            raise
        return kept, not self._is_refit or self._joins or (self._clock != "" and kept.clock == self._clock)

    def made(self) -> KeptFeatures:
        """Returns what the namespace keeps, after features that it did not keep were learnt here."""
        kept, counts = self._read()
        if counts and not kept.lacks(self._features):
            _log_earlier(self._core, self._features)
            return kept
        known = kept.statistics_for(self._features, self._core.namespace) if counts else {}
        for name, (was, now) in (kept.grown(self._features) if counts else {}).items():
            _log.warning(
                "features.%s: the vocabulary grew from %d to %d lines; the new lines have rows of their own",
                name,
                was,
                now,
            )
        with lone_work.doing("statistics of features"):
            made = kept.holding(self._fit(self._features.with_statistics(known)), self._clock)
        NamespaceFile(self._core, FEATURES_TABLE).write(made.written())
        return made

    def alone(self) -> KeptFeatures:
        """Returns what the namespace keeps, which is made here or by a lower rank."""

        def found() -> KeptFeatures | None:
            kept, counts = self._read()
            return kept if counts and not kept.lacks(self._features) else None

        return from_lower_rank(self._core, found, "statistics of features") or self.made()
