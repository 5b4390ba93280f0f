"""``sparserow predict``: scores the rows of a file with a published model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options


def predict(
    *,
    model: Annotated[str, typer.Option(help="NAME[@ALIAS|@VERSION].")],
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            help="File of the rows. For a version with features: .parquet, .orc, .arrow, .feather, .jsonl or CSV, with "
            "their columns. Otherwise CSV with the program's arguments: ids, or ids[0], ids[1].",
        ),
    ],
    root: options.ModelRoot,
    serving: options.Serving = options.DEFAULT_SERVING,
    output: Annotated[Path | None, typer.Option(help="File to write the lines to. Default: standard output.")] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Character between the fields of CSV. Default: a comma.")
    ] = None,
    list_delimiter: Annotated[
        str | None, typer.Option(help='Text between the elements of a list in a field of CSV. Default: "|".')
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(help="Text that means a missing value in CSV, besides the empty field; may be repeated."),
    ] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows in one call of the model.")] = 1024,
) -> None:
    """Score the rows of a file with a published model; its embedding rows come from the serving processes."""
    import sys
    from contextlib import nullcontext

    from ...proto.errors import InvalidArgument
    from ...proto.features.cells import RefusedRow
    from ...serving.client.client import ServingClient
    from ...serving.inference.column_files import TextOptions, is_with_types, read_columns
    from ...serving.inference.inference import ServedModel
    from ...serving.inference.prediction import format_output, read_batches

    text = TextOptions(delimiter or ",", list_delimiter or "|", tuple(missing or ()))
    given = [("--delimiter", delimiter), ("--list-delimiter", list_delimiter), ("--missing", missing)]
    unused = next((name for name, value in given if value is not None), None)
    if unused is not None and is_with_types(input_file):
        raise InvalidArgument(f"{unused}: has no effect with {input_file.suffix} files; it needs --input of CSV")
    if output is not None and not output.parent.is_dir():
        raise InvalidArgument(f"--output {output}: the folder of the file does not exist; create it first")
    with (
        ServingClient(serving, model=model) as client,
        ServedModel(client, root) as served,
        nullcontext(sys.stdout) if output is None else output.open("w", encoding="utf-8") as lines,
    ):
        if served.features is not None:
            before = 0
            for columns in read_columns(input_file, served.features, batch_rows, text):
                try:
                    output = served(columns)
                except RefusedRow as refused:
                    place = f"{input_file}, row {before + refused.row + 1}, column {refused.column}"
                    raise InvalidArgument(f"{place}: {refused.problem}") from None
                lines.writelines(f"{line}\n" for line in format_output(output))
                before += columns.num_rows
            return
        if unused is not None:
            raise InvalidArgument(f"{unused}: has no effect, as the version has no features; it takes tensors")
        for batch in read_batches(input_file, served.inputs, batch_rows):
            lines.writelines(f"{line}\n" for line in format_output(served(*batch)))
