"""What a namespace keeps of the features that its rows were trained with.

A bucket's number or a scaled value means what the statistics say, a line's number what the vocabulary says, and a key
what its options say. So a later run of the namespace uses the statistics, and one that means something else is refused.
A vocabulary may have more lines at its end, because the keys of the others stay.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from ..documents import Text, checked, parse_json
from ..errors import FailedPrecondition
from .base import Feature
from .feature_set import FeatureSet
from .kinds import BucketizedFeature, CrossFeature, IdFeature, ListOfKeys, NumericFeature, TimeFeature
from .statistics import Statistics
from .vocabulary import Vocabulary

FeaturesPolicy: TypeAlias = Literal["keep", "refit"]

_MOST_BYTES = 64 << 20
_SAID_BY_STATISTICS = ("quantiles",)  # edges that are given mean what those that were learnt mean
_ADVICE = (
    "rows of the namespace were trained with the former; allowed: what it was, or features_policy refit, by which they "
    "keep their values and mean something else"
)


@dataclass(frozen=True)
class KeptVocabulary:
    """What is kept of a vocabulary.

    Attributes:
        lines: the number of its tokens.
        digest: the XXH3-64 digest of its tokens, in hexadecimal digits.
    """

    lines: int
    digest: Text


@dataclass(frozen=True)
class KeptFeature:
    """What is kept of a feature.

    Attributes:
        how: the options that decide what its keys, numbers or statistics mean.
        statistics: (mean, std), (low, high), or the edges between buckets; None: it has none.
        vocabulary: its vocabulary; None: it has none.
    """

    how: dict[Text, Any]
    statistics: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None
    vocabulary: KeptVocabulary | None


@dataclass(frozen=True)
class KeptFeatures:
    """The document of a namespace. Its size is bounded by the features that its jobs have named.

    Attributes:
        format: the version of the format.
        clock: the name of the clock of the job that wrote it; "": it had none.
        features: what is kept, by the name of a feature.
    """

    format: Literal[1]
    clock: Text
    features: dict[Text, KeptFeature]

    def written(self) -> bytes:
        """Returns the document as JSON."""
        return json.dumps(asdict(self)).encode()

    def statistics_for(self, features: FeatureSet, namespace: str) -> dict[str, Statistics]:
        """Returns the kept statistics of the features that lack their own.

        Args:
            features: the features of a run.
            namespace: the name of the namespace, for error texts.

        Raises:
            FailedPrecondition: a feature has other statistics, another vocabulary, or other options that decide what
                they mean; the text names it.
        """
        found: dict[str, Statistics] = {}
        for feature in features.features:
            kept = self.features.get(feature.name)
            if kept is None:
                continue
            given = features.statistics.get(feature.name)
            words = _other_lines(kept.vocabulary, features.vocabularies.get(feature.name)) or _difference(
                kept.how, how_of(feature), () if given is None else _SAID_BY_STATISTICS
            )
            if not words and given is not None and kept.statistics != tuple(given):
                words = f"statistics: {_shown(given)} are not {_shown(kept.statistics)}"
            if words:
                where = f"features.{feature.name}: namespace {namespace!r} keeps others of an earlier run"
                raise FailedPrecondition(f"{where}: {words}; {_ADVICE}")
            if given is None and kept.statistics is not None:
                found[feature.name] = kept.statistics
        return found

    def lacks(self, features: FeatureSet) -> bool:
        """Whether a feature is not in the document, or has a vocabulary that grew."""
        return any(each.name not in self.features for each in features.features) or bool(self.grown(features))

    def grown(self, features: FeatureSet) -> dict[str, tuple[int, int]]:
        """Returns the numbers of lines that a vocabulary had and has, by the name of each feature whose one grew."""
        lines = {
            name: (self.features[name].vocabulary, len(vocabulary))
            for name, vocabulary in features.vocabularies.items()
            if name in self.features
        }
        return {name: (was.lines, now) for name, (was, now) in lines.items() if was is not None and was.lines < now}

    def holding(self, features: FeatureSet, clock: str) -> KeptFeatures:
        """Returns the document with these features in place of those of the same names.

        Args:
            features: the features, which lack no statistics.
            clock: the name of the clock of the job.
        """
        added = {
            each.name: KeptFeature(
                how_of(each),
                features.statistics.get(each.name),
                None if (lines := features.vocabularies.get(each.name)) is None else _kept(lines),
            )
            for each in features.features
        }
        return KeptFeatures(1, clock, {**self.features, **added})


NOTHING_KEPT = KeptFeatures(1, "", {})
_DOCUMENT = TypeAdapter(KeptFeatures)


def kept_of(data: bytes, where: str) -> KeptFeatures:
    """Returns the features of a document.

    Args:
        data: the bytes of the document.
        where: its place, which begins error texts.

    Raises:
        DataLoss: it is no such document.
    """
    return checked(_DOCUMENT, parse_json(data, where, _MOST_BYTES), where)


def how_of(feature: Feature) -> dict[str, Any]:
    """Returns the options that decide what a feature's keys, numbers or statistics mean, as plain values by name."""
    if isinstance(feature, NumericFeature):
        clip = None if feature.clip is None else list(feature.clip)
        return {"columns": list(feature.columns), "clip": clip, "log1p": feature.log1p, "scale": feature.scale}
    if isinstance(feature, BucketizedFeature):
        return {"columns": list(feature.columns), "quantiles": feature.quantiles}
    if isinstance(feature, CrossFeature):
        return {"of": list(feature.of), "modulo": feature.modulo}
    if isinstance(feature, TimeFeature):
        return {"part": feature.part, "zone": feature.zone}
    if isinstance(feature, IdFeature | ListOfKeys):
        return {"modulo": feature.modulo, "unknown_rows": feature.unknown_rows}
    return {}


def digest_of(features: FeatureSet, name: str) -> str | None:
    """Returns the XXH3-64 digest of a feature's vocabulary in hexadecimal digits; None: it has no vocabulary."""
    vocabulary = features.vocabularies.get(name)
    return None if vocabulary is None else vocabulary.digest()


def _kept(vocabulary: Vocabulary) -> KeptVocabulary:
    return KeptVocabulary(len(vocabulary), vocabulary.digest())


def _other_lines(kept: KeptVocabulary | None, now: Vocabulary | None) -> str:
    """Returns how a vocabulary differs from the one that was kept; "": at most by more lines at its end."""
    if kept is None or now is None:
        found = None if now is None else _kept(now)
        return "" if found == kept else f"vocabulary: {_named(found)} is not {_named(kept)}"
    if len(now) < kept.lines:
        return f"vocabulary: {now.name} has {len(now)} lines, and the former had {kept.lines}; new lines go to its end"
    if now.digest(kept.lines) != kept.digest:
        return f"vocabulary: the first {kept.lines} lines of {now.name} are others; new lines go to its end"
    return ""


def _named(vocabulary: KeptVocabulary | None) -> str:
    return "no vocabulary" if vocabulary is None else f"one of {vocabulary.lines} lines"


def _shown(statistics: Statistics | None) -> str:
    values = list(statistics or ())
    return "none" if not values else f"{values[:4]}{'' if len(values) <= 4 else f' and {len(values) - 4} more'}"


def _difference(kept: Mapping[str, Any], now: Mapping[str, Any], without: Collection[str]) -> str:
    names = [name for name in dict.fromkeys([*kept, *now]) if kept.get(name) != now.get(name) and name not in without]
    return ", ".join(f"{name}: {now.get(name)!r} is not {kept.get(name)!r}" for name in names)
