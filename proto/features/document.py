"""Features as files beside a published program: ``features.json`` and a file for each vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, TypeAdapter, ValidationError

from ..documents import Positive, check_format, checked, parse_json
from ..errors import DataLoss, InvalidArgument
from ..options.csv_dialect import CsvDialect
from ..row_keys import TextHasher, hash_texts
from .base import Feature
from .feature_set import FeatureSet
from .kinds import KINDS, NumericFeature, feature_of
from .vocabulary import Vocabulary

FEATURES = "features.json"
FORMAT, OLDEST_FORMAT = 2, 2  # what is written, and the oldest that is read
MOST_BYTES = 64 << 20

_Text = Annotated[str, Strict()]
_Numbers = tuple[Annotated[float, Field(allow_inf_nan=False)], ...]


@dataclass(frozen=True)
class FeatureDocument:
    """The contents of ``features.json``.

    Attributes:
        format: the version of the format.
        features: the options of each feature by its name, in order; ``vocabulary`` names a file beside this one.
        statistics: by the name of a feature: (mean, std), (low, high), or the edges between buckets.
        arguments: the feature of each argument of the program, in order.
        csv: how the delimited text of the training files writes its fields, every option of :class:`CsvDialect`; null:
            there was none.
        rows: by the name of a feature: the number of rows of its table, where the model looks a key up at key modulo
            rows.
    """

    format: Literal[2]
    features: dict[_Text, dict[_Text, Any]]
    statistics: dict[_Text, _Numbers]
    arguments: tuple[_Text, ...]
    csv: dict[_Text, Any] | None
    rows: dict[_Text, Positive]


_DOCUMENT = TypeAdapter(FeatureDocument)


def files_of(features: FeatureSet, arguments: Sequence[str]) -> dict[str, bytes]:
    """Returns the files of a set of features by name, ``features.json`` first.

    Args:
        features: the features, which lack no statistics.
        arguments: the feature of each argument of the program, in order.
    """
    names: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for number, (name, vocabulary) in enumerate(features.vocabularies.items()):
        same = next((old for old, data in files.items() if data == vocabulary.data), None)
        names[name] = same or f"vocabulary.{number}.txt"
        files[names[name]] = vocabulary.data
    document = {
        "format": FORMAT,
        "features": {feature.name: _options(feature, names) for feature in features.features},
        "statistics": {name: list(values) for name, values in features.statistics.items()},
        "arguments": list(arguments),
        "csv": None if features.csv is None else features.csv.model_dump(mode="json"),
        "rows": dict(features.rows),
    }
    return {FEATURES: json.dumps(document, indent=1).encode(), **files}


def _options(feature: Feature, vocabularies: dict[str, str]) -> dict[str, Any]:
    """Returns the options of a feature, with the name of its vocabulary's file in place of the publisher's path."""
    options = feature.model_dump(mode="json", exclude={"name"}) | {"kind": feature.kind}  # type: ignore[attr-defined]
    return options | ({"vocabulary": vocabularies[feature.name]} if feature.name in vocabularies else {})


def vocabulary_files(data: bytes, where: str) -> tuple[str, ...]:
    """Returns the names of the vocabularies' files, each once.

    Args:
        data: the bytes of ``features.json``.
        where: the place of the files, which begins error texts.

    Raises:
        DataLoss: the file does not hold features, or has another format.
    """
    place = f"{where}/{FEATURES}"
    document = _document_of(data, place)
    named = (options.get("vocabulary") for options in document.features.values())
    return tuple(dict.fromkeys(file for file in named if isinstance(file, str)))


def features_of(
    files: dict[str, bytes], where: str, hasher: TextHasher = hash_texts
) -> tuple[FeatureSet, tuple[str, ...]]:
    """Returns the features that files hold, and that of each argument of the program.

    Args:
        files: the files by name, as :func:`files_of` made them.
        where: the place of the files, which begins error texts.
        hasher: makes keys of texts.

    Raises:
        DataLoss: a file is missing, does not hold features, or has another format.
    """
    place = f"{where}/{FEATURES}"
    document = _document_of(files[FEATURES], place)
    try:
        features = tuple(feature_of(name, _chosen(entry)) for name, entry in document.features.items())
        named = {feature.name: getattr(feature, "vocabulary", None) for feature in features}
        by_file = {file: Vocabulary(files[file], file, hasher) for file in set(named.values()) if file is not None}
        vocabularies = {name: by_file[file] for name, file in named.items() if file is not None}
        given = FeatureSet.of([_without_vocabulary(feature) for feature in features], _no_file).statistics
    except (InvalidArgument, KeyError) as error:
        raise DataLoss(f"{place}: is damaged: {error}") from None
    csv = None if document.csv is None else _dialect_of(document.csv, place)
    whole = FeatureSet(features, {**given, **document.statistics}, vocabularies, hasher, csv, document.rows)
    if whole.lacks or set(document.arguments) != {feature.name for feature in features}:
        raise DataLoss(f"{place}: is damaged: its features, statistics and arguments do not match")
    for feature in features:
        if isinstance(feature, NumericFeature) and feature.scale != "none" and len(whole.statistics[feature.name]) != 2:
            raise DataLoss(f"{place}: is damaged: statistics.{feature.name} has not two numbers")
    return whole, document.arguments


def _document_of(data: bytes, place: str) -> FeatureDocument:
    document = parse_json(data, place, MOST_BYTES)
    found = document.get("format") if isinstance(document, dict) else None
    check_format(found, OLDEST_FORMAT, FORMAT, f"{place}: the document of features", DataLoss)
    return checked(_DOCUMENT, document, place)


def _chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a feature without those that are the default, which may have no effect beside others."""
    fields = KINDS[options["kind"]].model_fields if options.get("kind") in KINDS else {}
    plain = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return {
        name: value
        for name, value in options.items()
        if name == "kind"
        or name not in plain
        or value != (list(plain[name]) if isinstance(plain[name], tuple) else plain[name])
    }


def _dialect_of(options: dict[str, Any], place: str) -> CsvDialect:
    if set(options) != set(CsvDialect.model_fields):
        raise DataLoss(f"{place}: is damaged: csv has not the options of a dialect")
    try:
        return CsvDialect.model_validate(options)
    except (ValidationError, InvalidArgument) as error:
        raise DataLoss(f"{place}: is damaged: csv: {' '.join(str(error).split())}") from None


def _without_vocabulary(feature: Feature) -> Feature:
    if getattr(feature, "vocabulary", None) is None:
        return feature
    return feature.model_copy(update={"vocabulary": None})


def _no_file(path: str) -> bytes:
    raise InvalidArgument(f"{path} is not among the files")
