"""``sparserow status``: shows the state of a cluster on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options


def status(
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = options.DEFAULT_ADDRESS,
    serving: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the gRPC servers of serving processes, with commas, to show how fresh they are."
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Namespace whose tables, jobs, faults and keys are shown. Default: all.")
    ] = None,
    over: Annotated[
        str,
        typer.Option(help="Time between the two readings for rates and times, such as 1s; 0s: one reading, no rates."),
    ] = "0.5s",
    faults: Annotated[bool, typer.Option("--faults", help="Show only why workers ended, with tracebacks.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="File to write the figures to, as JSON; -: print them instead of the screen."),
    ] = None,
) -> None:
    """Show a cluster: shards, load, tables, hot keys, jobs, faults of workers. Exit code 1 when it cannot be reached or
    is not ready.
    """
    import json
    from dataclasses import asdict

    from ...proto.control import ControlClient
    from ...proto.errors import InvalidArgument
    from ...proto.options.units import parse_seconds
    from ...proto.status.cluster_status import document_of
    from ...proto.status.fault_view import fault_text, fault_views
    from ..observe.cluster_screen import screen, serving_table
    from ..observe.serving_view import describe_serving
    from ..observe.two_readings import look
    from .result_file import check_result_file, write_result
    from .terminal import tables_console

    seconds = parse_seconds(over)
    is_text = json_file is None or str(json_file) != "-"
    check_result_file(json_file if is_text else None)
    if faults and (serving is not None or over != "0.5s"):
        option = "--serving" if serving is not None else "--over"
        raise InvalidArgument(f"{option}: has no effect with --faults, which shows nothing else")
    with ControlClient(coordinator) as client:
        if faults:
            views = fault_views(
                fault for fault in client.list_faults() if namespace is None or fault.namespace == namespace
            )
            figures = {"faults": [asdict(each) for each in views]}
            typer.echo(fault_text(views) if is_text else json.dumps(figures, indent=2))
            write_result(json_file if is_text else None, figures)
            return
        reply, view = look(client, seconds, namespace=namespace)
    served = describe_serving(serving.split(",")) if serving is not None else []
    document = document_of(view, [asdict(each) for each in served])
    if is_text:
        console = tables_console()
        console.print(screen(coordinator, reply, view))
        if served:
            console.print(serving_table(served))
        write_result(json_file, document)
    else:
        typer.echo(json.dumps(document, indent=2))
    if not view.ready or any(each.problem for each in served):
        raise typer.Exit(1)
