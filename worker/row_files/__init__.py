"""Exports and imports rows of tables as files in common formats, and imports weights of models trained elsewhere."""

from .export import export_table
from .keyed_rows import import_table
from .matrices import import_weights

__all__ = ["export_table", "import_table", "import_weights"]
