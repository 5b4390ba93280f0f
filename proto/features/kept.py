"""What a namespace keeps of the features that its rows were trained with: statistics, and digests of vocabularies.

A bucket's number or a scaled value means what the statistics say, and a line's number what the vocabulary says. So a
later run of the namespace uses them, and one that has others is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter
from xxhash import xxh3_64_hexdigest

from ..documents import Text, checked, parse_json
from ..errors import FailedPrecondition
from .base import Feature
from .feature_set import FeatureSet
from .kinds import BucketizedFeature, NumericFeature
from .statistics import Statistics

FeaturesPolicy: TypeAlias = Literal["keep", "refit"]

_MOST_BYTES = 64 << 20
_ADVICE = (
    "rows of the namespace were trained with the former; allowed: what it was, or features_policy refit, by which they "
    "keep their values and mean something else"
)


@dataclass(frozen=True)
class KeptFeature:
    """What is kept of a feature.

    Attributes:
        how: the options that decide what its statistics mean.
        statistics: (mean, std), (low, high), or the edges between buckets; None: it has none.
        vocabulary: the XXH3-64 digest of the vocabulary's file; None: it has none.
    """

    how: dict[Text, Any]
    statistics: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None
    vocabulary: Text | None


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
            given, digest = features.statistics.get(feature.name), digest_of(features, feature.name)
            words = None
            if kept.vocabulary != digest:
                words = f"vocabulary: {_named(digest)} is not {_named(kept.vocabulary)}"
            elif given is not None and kept.statistics != tuple(given):
                words = f"statistics: {_shown(given)} are not {_shown(kept.statistics)}"
            elif given is None and kept.how != how_of(feature):
                words = _difference(kept.how, how_of(feature))
            if words is not None:
                where = f"features.{feature.name}: namespace {namespace!r} keeps others of an earlier run"
                raise FailedPrecondition(f"{where}: {words}; {_ADVICE}")
            if given is None and kept.statistics is not None:
                found[feature.name] = kept.statistics
        return found

    def lacks(self, features: FeatureSet) -> bool:
        """Whether a feature that has statistics or a vocabulary is not in the document."""
        return any(is_kept(features, each) and each.name not in self.features for each in features.features)

    def holding(self, features: FeatureSet, clock: str) -> KeptFeatures:
        """Returns the document with these features in place of those of the same names.

        Args:
            features: the features, which lack no statistics.
            clock: the name of the clock of the job.
        """
        added = {
            each.name: KeptFeature(how_of(each), features.statistics.get(each.name), digest_of(features, each.name))
            for each in features.features
            if is_kept(features, each)
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


def is_kept(features: FeatureSet, feature: Feature) -> bool:
    """Whether a feature has, or is to have, statistics or a vocabulary."""
    return feature.needs_statistics or feature.name in features.statistics or feature.name in features.vocabularies


def how_of(feature: Feature) -> dict[str, Any]:
    """Returns the options that decide what a feature's statistics mean, as plain values by name."""
    if isinstance(feature, NumericFeature):
        clip = None if feature.clip is None else list(feature.clip)
        return {"columns": list(feature.columns), "clip": clip, "log1p": feature.log1p, "scale": feature.scale}
    if isinstance(feature, BucketizedFeature):
        return {"columns": list(feature.columns), "quantiles": feature.quantiles}
    return {}


def digest_of(features: FeatureSet, name: str) -> str | None:
    """Returns the XXH3-64 digest of a feature's vocabulary in hexadecimal digits; None: it has no vocabulary."""
    vocabulary = features.vocabularies.get(name)
    return None if vocabulary is None else xxh3_64_hexdigest(vocabulary.data)


def _named(digest: str | None) -> str:
    return "no vocabulary" if digest is None else f"the file with digest {digest}"


def _shown(statistics: Statistics | None) -> str:
    values = list(statistics or ())
    return "none" if not values else f"{values[:4]}{'' if len(values) <= 4 else f' and {len(values) - 4} more'}"


def _difference(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in dict.fromkeys([*kept, *now]) if kept.get(name) != now.get(name)]
    return ", ".join(f"{name}: {now.get(name)!r} is not {kept.get(name)!r}" for name in names)
