"""Readers of click logs (Criteo, delimited text), and a generator of synthetic ones."""

from .bad_line import BadLine
from .batch import Batch
from .features import Features, FeatureSpec
from .open_reader import feature_spec, find_files, fit_features, open_reader
from .reader import ClickReader, DataFile, ReadOptions
from .synthetic import SyntheticLog, write_click_log

__all__ = [
    "BadLine",
    "Batch",
    "ClickReader",
    "DataFile",
    "FeatureSpec",
    "Features",
    "ReadOptions",
    "SyntheticLog",
    "feature_spec",
    "find_files",
    "fit_features",
    "open_reader",
    "write_click_log",
]
