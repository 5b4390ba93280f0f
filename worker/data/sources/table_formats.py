"""The formats of files with columns, by the names that ``data.format`` has for them."""

from __future__ import annotations

from .tables import TableFormat


def table_format(name: str) -> TableFormat:
    """Returns a format: parquet, orc, arrow or jsonl."""
    # Each module is imported where its format is used, as Arrow's modules take time.
    if name == "parquet":
        from .parquet import ParquetFormat

        return ParquetFormat()
    if name == "orc":
        from .orc import OrcFormat

        return OrcFormat()
    if name == "arrow":
        from .ipc import IpcFormat

        return IpcFormat()
    from .json_lines import JsonLinesFormat

    return JsonLinesFormat()
