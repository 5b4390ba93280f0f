"""The description of a file's format for a reader. Each format has a factory, which ``data.format`` of a job chooses.

A new format needs a function from a path to :class:`FileFormat` in a file of its own, a value of
``DataConfig.format``, and a case in ``open_reader``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .features import FeatureSpec
from .line_layout import LineLayout


@dataclass(frozen=True)
class FileFormat:
    """The format of one file.

    Attributes:
        layout: the layout of its lines.
        header: whether its first line is a header.
        features: the inputs that the model reads from it.
    """

    layout: LineLayout
    header: bool
    features: FeatureSpec
