"""Readers of click logs, their batches and their order, and a generator of synthetic logs."""

from .bad_line import BadLine
from .batch import Batch
from .candidates import CandidateSampler
from .features import FeatureSpec, FittedFeatures
from .named_batch import NamedBatch, NamedPart
from .reader import ClickReader, ReadOptions
from .source import PlannedFile
from .synthetic import SyntheticLog, write_click_log
from .synthetic_sales import SalesLog, write_sales_log

__all__ = [
    "BadLine",
    "Batch",
    "CandidateSampler",
    "ClickReader",
    "FeatureSpec",
    "FittedFeatures",
    "NamedBatch",
    "NamedPart",
    "PlannedFile",
    "ReadOptions",
    "SalesLog",
    "SyntheticLog",
    "write_click_log",
    "write_sales_log",
]
