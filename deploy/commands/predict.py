"""``sparserow predict``: scores the rows of a file with a published model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options

if TYPE_CHECKING:
    from ...proto.features.feature_set import FeatureSet
    from ...serving.inference.column_files import ColumnSource


def predict(
    *,
    model: Annotated[str, typer.Option(help="NAME[@ALIAS|@VERSION].")],
    input_file: Annotated[
        Path,
        typer.Option(
            "--input",
            help="File of the rows. For a version with features: .parquet, .orc, .arrow, .feather, .jsonl or CSV, with "
            "their columns; CSV is read as the training files were, but for options that are given here. Otherwise CSV "
            "with the program's arguments: ids, or ids[0], ids[1].",
        ),
    ],
    root: options.ModelRoot,
    serving: options.Serving = options.DEFAULT_SERVING,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write to. A name that ends in .parquet gives a column for each output. Default: lines on "
            "standard output."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Column of the input to copy to a Parquet output, such as an id; may be repeated."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Output of the model to write to a Parquet output; may be repeated. Default: all."),
    ] = None,
    nulls: Annotated[
        bool, typer.Option("--nulls", help="Take columns that the input lacks as nulls, such as a user's for items.")
    ] = False,
    delimiter: Annotated[str | None, typer.Option(help="Character between the fields of CSV.")] = None,
    list_delimiter: Annotated[
        str | None, typer.Option(help="Character between the elements of a list in a field of CSV.")
    ] = None,
    quote: Annotated[str | None, typer.Option(help="Character around fields of CSV; empty: none.")] = None,
    comment: Annotated[
        str | None, typer.Option(help="A line of CSV that begins with this text is skipped; empty: none.")
    ] = None,
    trim: Annotated[bool | None, typer.Option(help="Whether spaces around a field of CSV are dropped.")] = None,
    header: Annotated[bool | None, typer.Option(help="Whether the first line of CSV names the columns.")] = None,
    columns: Annotated[
        str | None, typer.Option(help="Names of all columns of CSV in file order, with commas between them.")
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(help="Text that means a missing value in CSV, besides the empty field; may be repeated."),
    ] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows in one call of the model.")] = 1024,
) -> None:
    """Score the rows of a file with a published model; its embedding rows come from the serving processes.

    With a Parquet output it writes vectors of items for an index of nearest neighbours.
    """
    import contextlib
    import sys

    import pyarrow as pa
    import torch

    from ...proto.errors import InvalidArgument
    from ...proto.process.cores import available_cores
    from ...serving.client.client import ServingClient
    from ...serving.inference.column_files import check_exists, naming_rows, read_columns
    from ...serving.inference.inference import ServedModel
    from ...serving.inference.output_files import write_parquet
    from ...serving.inference.prediction import format_output, read_batches
    from ...worker.data.sources.table_columns import has_columns

    given = {
        "columns": None if columns is None else tuple(columns.split(",")),
        "header": header,
        "delimiter": delimiter,
        "list_delimiter": list_delimiter,
        "quote": quote,
        "comment": comment,
        "trim": trim,
        "missing": None if missing is None else tuple(missing),
    }
    given = {name: value for name, value in given.items() if value is not None}
    unused = next((f"--{name.replace('_', '-')}" for name in given), None)
    if unused is not None and has_columns(input_file):
        raise InvalidArgument(f"{unused}: has no effect with {input_file.suffix} files; it needs --input of CSV")
    if output is not None and not output.parent.is_dir():
        raise InvalidArgument(f"--output {output}: the folder of the file does not exist; create it first")
    is_parquet = output is not None and output.suffix == ".parquet"
    for option, names in (("--keep", keep), ("--only", only)):
        if names and not is_parquet:
            raise InvalidArgument(f"{option}: has no effect without an --output that ends in .parquet; remove it")
    torch.set_num_threads(min(torch.get_num_threads(), available_cores()))
    pa.set_cpu_count(min(pa.cpu_count(), available_cores()))
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(ServingClient(serving, model=model))
        served = opened.enter_context(ServedModel(client, root, refresh_sec=None))
        score = naming_rows(input_file, served)
        if served.features is None:
            for option, value in (("--nulls", nulls), ("a Parquet --output", is_parquet)):
                if value:
                    raise InvalidArgument(f"{option}: needs a version with features; {model} takes tensors")
        else:
            check_exists(input_file)
            source = _source_of(input_file, served.features, given)
        if served.features is not None and output is not None and is_parquet:
            batches = read_columns(input_file, source, served.features, batch_rows, keep=keep or (), nulls=nulls)
            rows = write_parquet(output, batches, score, keep=keep or (), outputs=only or ())
            typer.echo(f"{rows:,} rows in {output}")
            return
        lines = sys.stdout if output is None else opened.enter_context(output.open("w", encoding="utf-8"))
        if served.features is not None:
            for rows_of_batch in read_columns(input_file, source, served.features, batch_rows, nulls=nulls):
                lines.writelines(f"{line}\n" for line in format_output(score(rows_of_batch)))
            return
        if unused is not None:
            raise InvalidArgument(f"{unused}: has no effect, as the version has no features; it takes tensors")
        for batch in read_batches(input_file, served.inputs, batch_rows):
            lines.writelines(f"{line}\n" for line in format_output(served(*batch)))


def _source_of(path: Path, features: FeatureSet, given: dict[str, Any]) -> ColumnSource:
    """Opens the columns of a file: of delimited text by the dialect of the training files, but for what is given."""
    from ...worker.data.sources.table_columns import TableColumns, has_columns
    from ...worker.data.sources.text_columns import FALLBACK, CsvColumns

    if has_columns(path):
        return TableColumns(path, features)
    if given.get("header") and "columns" not in given:
        given = {"columns": (), **given}  # the names are those of this file's header
    return CsvColumns(path, features, (features.csv or FALLBACK).changed(given))
