"""Shows what a dry run of a job found, as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ...proto.options.units import format_bytes
from .dry_run import DryRun

_PLACES = {
    "servers": "servers",
    "device": "devices of workers",
    "auto": "servers or devices",
    "worker": "each worker",
}


def show(made: DryRun, console: Console | None = None) -> None:
    """Prints the tensors, the tables and the step of a job.

    Args:
        made: what the dry run found.
        console: where it is printed; None: standard output.
    """
    console = console or Console()
    tensors = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("tensor", "dtype", "shape", "first values"):
        tensors.add_column(title)
    for tensor in made.tensors:
        tensors.add_row(tensor.name, tensor.dtype, str(tensor.shape), tensor.example)
    tables = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("table", "rows at most", "dim", "a row", "all rows", "place"):
        tables.add_column(title, no_wrap=title == "table")  # a name is to be copied
    for table in made.tables:
        place = _PLACES[table.placement]
        tables.add_row(
            table.name, f"{table.rows:,}", str(table.dim), f"{table.row_bytes} B", format_bytes(table.bytes), place
        )
    console.print(f"job {made.job}: {made.train_files} training and {made.test_files} test files; nothing is trained")
    console.print(tensors)
    if made.fits_statistics:
        console.print("The statistics are those of these samples; a job reads all training data once for them.")
    console.print(tables)
    pulled, pushed = format_bytes(round(made.pull_bytes)), format_bytes(round(made.push_bytes))
    console.print(f"dense parameters: {made.dense_parameters:,}")
    console.print(
        f"a worker's step: about {made.unique_keys:,.0f} different keys, pull {pulled}, push {pushed} (Zipf 1.05; "
        "sparserow plan takes other laws)",
        soft_wrap=True,
    )
