"""Data, as ``sr.data``: readers of click logs, their batches, and generators of synthetic logs."""

from ..data import (
    BadLine as BadLine,
    Batch as Batch,
    CandidateSampler as CandidateSampler,
    NamedBatch as NamedBatch,
    NamedPart as NamedPart,
    SalesLog as SalesLog,
    SyntheticLog as SyntheticLog,
    write_click_log as write_click_log,
    write_sales_log as write_sales_log,
)
from ..data.sources.click_dataset import ClickDataset as ClickDataset
