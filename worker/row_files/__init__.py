"""Exports and imports rows of tables as files in common formats, and imports weights of models trained elsewhere."""

from .export import export_rows
from .keyed_rows import load_rows
from .matrices import import_weights

__all__ = ["export_rows", "import_weights", "load_rows"]
