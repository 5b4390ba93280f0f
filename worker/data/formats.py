"""What a reader must know of a file format: one factory a format, chosen by ``data.format`` of a job.

To add a format: a function from a path to :class:`FileFormat` in a file of its own, a value of ``DataConfig.format``,
and a case in ``open_reader``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .features import FeatureSpec
from .line_layout import LineLayout


@dataclass(frozen=True)
class FileFormat:
    """One file's layout, whether its first line is a header, and what the model reads of it."""

    layout: LineLayout
    header: bool
    features: FeatureSpec
