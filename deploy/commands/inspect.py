"""``sparserow inspect``: shows the rows that a stopped shard left on its SSD."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...proto.errors import InvalidArgument


def inspect(
    path: Annotated[Path, typer.Argument(help="A shard's folder: ssd_path/shard-N.", show_default=False)],
    table: Annotated[str | None, typer.Option(help="With --key: the table, by id or NAMESPACE/NAME.")] = None,
    key: Annotated[int | None, typer.Option(help="With --table: the row to decode.")] = None,
) -> None:
    """Show the rows and bytes by table in a stopped shard's SSD folder, and one row decoded.

    Every row is checked. Rows that were only in memory when the shard stopped are not there.
    """
    from rich.table import Table

    from ...proto.options.units import format_bytes
    from ..observe.ssd_inspection import inspect_folder
    from .terminal import tables_console

    if (table is None) != (key is None):
        raise InvalidArgument("--table and --key belong together: name the table and the key of one row")
    contents = inspect_folder(path, table=table, key=key)
    console = tables_console()
    manifest = contents.manifest
    console.print(f"shard {manifest['shard']} of cluster {manifest['cluster']:016x}, format {manifest['format']}")
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("table", "id", "rows", "bytes"):
        lines.add_column(column, justify="left" if column == "table" else "right")
    for each in contents.tables:
        lines.add_row(each.name or "-", str(each.table_id), f"{each.rows:,}", format_bytes(each.bytes))
    console.print(lines if contents.tables else "no rows")
    for row in contents.rows:
        console.print(f"key {row.key}: slot {row.slot}, {row.dtype}, {row.update_count} updates")
        console.print(f"version: lineage {row.version >> 48}, sequence {row.version & (1 << 48) - 1}")
        console.print(f"weights: {row.weights}", soft_wrap=True)
        console.print(f"state: {row.state}", soft_wrap=True)
