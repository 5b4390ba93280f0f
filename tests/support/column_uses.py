"""A shorthand of tests for features by the use of their columns, in the section that names the label.

    csv={label: y, numeric: {x: log_standardize}, categorical: [c], buckets: {x: 8}}

stands for the section without the uses, and the features x, c and x_bucket. A column by position is ``column_N``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.features.kinds import feature_of
from sparserow.proto.options.document import load_config


def data_of(*sets: str) -> DataConfig:
    """Returns a section ``data`` of assignments, one of which has uses."""
    rest, features = _split(sets)
    config = load_config(DataConfig, None, rest)
    config.read_features(tuple(feature_of(name, options) for name, options in features.items()))
    return config


def job_sets(*sets: str) -> list[str]:
    """Returns the assignments of a job, with a section ``features`` in place of the uses."""
    rest, features = _split(sets)
    return [*rest, f"features={json.dumps(features)}"]


def features_of_uses(
    numeric: Mapping[str, str] | None = None, categorical: Iterable[Any] = (), buckets: Mapping[str, int] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the section ``features``: numbers, then keys, then buckets."""
    made: dict[str, dict[str, Any]] = {}
    for column, transform in (numeric or {}).items():
        scale = "standardize" if transform.endswith("standardize") else "none"
        made |= _feature(column, {"kind": "dense", "log1p": transform.startswith("log"), "scale": scale})
    for column in categorical:
        made |= _feature(column, {"kind": "id"})
    for column, count in (buckets or {}).items():
        made |= _feature(column, {"kind": "bucketize", "quantiles": count}, "_bucket")
    return made


def _feature(column: str | int, options: dict[str, Any], end: str = "") -> dict[str, dict[str, Any]]:
    name = f"column_{column}" if str(column).isdecimal() else str(column)
    return {re.sub(r"\W", "_", name) + end: options | {"column": name}}


def _split(sets: Iterable[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    rest, features = [], {}
    for each in sets:
        key, _, text = each.partition("=")
        if key.removeprefix("data.") in ("csv", "columns") and text.startswith("{"):
            section = yaml.safe_load(text)
            uses = {use: section.pop(use) for use in ("numeric", "categorical", "buckets") if use in section}
            features |= features_of_uses(**uses)
            each = f"{key}={json.dumps(section)}"
        rest.append(each)
    return rest, features
