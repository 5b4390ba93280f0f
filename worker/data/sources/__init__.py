"""Sources of samples: text, Parquet, ORC, Arrow and JSON lines; opens the readers of a job."""

from .feature_columns import feature_set
from .open_reader import (
    check_files,
    check_samples,
    feature_spec,
    find_files,
    first_samples,
    fit_features,
    item_table,
    open_reader,
    plan_files,
    spec_of,
)

__all__ = [
    "check_files",
    "check_samples",
    "feature_set",
    "feature_spec",
    "find_files",
    "first_samples",
    "fit_features",
    "item_table",
    "open_reader",
    "plan_files",
    "spec_of",
]
