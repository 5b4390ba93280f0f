"""Rows of tables in files that anyone can open: export, import, and initial weights from a model trained elsewhere."""

from .export import export_table
from .keyed_rows import import_table
from .matrices import import_weights

__all__ = ["export_table", "import_table", "import_weights"]
