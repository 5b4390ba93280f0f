"""``sparserow publish``: publishes rows of a running cluster as a new version of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import options

if TYPE_CHECKING:
    from ...proto.control import ControlClient
    from ...proto.published.manifest import ServedDtype
    from ...worker.publish.program_export import Program


def publish(
    model: Annotated[str, typer.Argument(help="Name of the model.", show_default=False)],
    *,
    root: options.ModelRoot,
    namespace: Annotated[str, typer.Option(help="Namespace whose tables are published.")],
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the training cluster.")] = options.DEFAULT_ADDRESS,
    alias: Annotated[
        str, typer.Option(help='Alias that names the version once it is complete; "": no alias.')
    ] = "live",
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Dtype of the rows: float32, bfloat16, float16 or int8, or PATTERN=DTYPE. Default: as in training."
        ),
    ] = None,
    card: Annotated[list[str] | None, typer.Option(help="KEY=VALUE to add to the model card; may be repeated.")] = None,
    program: Annotated[
        str | None, typer.Option(help="Path or URL of a program that a run has kept. Default: only rows are published.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="Path or URL of the folder of features that a run has kept with its program. Default: the program "
            "takes tensors alone."
        ),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Name of a table that is not published; may be repeated.")
    ] = None,
    sign: Annotated[
        str | None,
        typer.Option(help="rows: the signature covers the rows too. Default: all else, where there is a signing_key."),
    ] = None,
) -> None:
    """Publish the rows of a namespace, and the program that a run of a job file kept.

    Your own trainer publishes both with ``session.publish(name, model=...)``.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ...proto.control import ControlClient
    from ...proto.errors import InvalidArgument
    from ...proto.options.units import format_bytes
    from ...proto.security.security import process_security
    from ...worker.publish.asked_version import checked_sign
    from ...worker.publish.publishing import Publication, publish_from

    if features is not None and program is None:
        raise InvalidArgument("--features: has no effect without --program, whose inputs they make; name both")
    signed = checked_sign(sign, process_security(), "--sign")
    columns = (SpinnerColumn(), TextColumn("publish {task.completed:,} rows"), TimeElapsedColumn())
    with ControlClient(coordinator) as control:
        publication = Publication(
            name=model,
            root=root,
            alias=alias or None,
            dtype=_dtypes(dtype or []),
            card=_card(card or []),
            program=None if program is None else _program(program, control, namespace, without or []),
            without=tuple(without or ()),
            features={} if features is None or program is None else _features(features, program),
            sign=signed,
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            done = publish_from(control, namespace, publication, lambda rows: bar.update(task, completed=rows))
    typer.echo(f"published {done.model}@{done.version}: {done.rows:,} rows, {format_bytes(done.bytes)}, {done.url}")


def _program(path: str, control: ControlClient, namespace: str, without: list[str]) -> Program:
    from ...proto.security.security import loaded_security
    from ...worker.publish.program_export import program_of_file

    tables = {schema.full_name for schema in control.list_tables(namespace) if schema.name not in without}
    return program_of_file(path, tables, is_signed=bool(loaded_security(control.security).signing_key))


def _features(path: str, program: str) -> dict[str, bytes]:
    from ...proto.checkpoint.folder import Folder
    from ...proto.checkpoint.urls import absolute, parent_of
    from ...proto.published.kept_features import kept_features

    folder, name = parent_of(program)
    return kept_features(Folder(absolute(path)), bytes(Folder(folder).read(name)))


def _dtypes(given: list[str]) -> dict[str, ServedDtype] | None:
    from ...proto.errors import not_allowed
    from ...proto.published.manifest import SERVED_DTYPES

    chosen: dict[str, ServedDtype] = {}
    for text in given:
        pattern, _, name = text.rpartition("=")
        dtype = next((dtype for dtype in SERVED_DTYPES if dtype == name), None)
        if dtype is None:
            raise not_allowed("--dtype", text, SERVED_DTYPES)
        chosen[pattern or "*"] = dtype
    return chosen or None


def _card(given: list[str]) -> dict[str, str | float]:
    from ...proto.errors import not_allowed

    card: dict[str, str | float] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise not_allowed("--card", text, "KEY=VALUE")
        try:
            card[key] = float(value)
        except ValueError:
            card[key] = value
    return card
