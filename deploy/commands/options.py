"""Options that several commands share, each with one help text."""

from __future__ import annotations

from typing import Annotated

import typer


def _follow_parent(parent_pid: int) -> int:
    if parent_pid:
        from ...proto.process.parent import die_with_parent

        die_with_parent(parent_pid)
    return parent_pid


def absolute_roots(roots: list[str] | None) -> list[str]:
    """Returns paths and URLs that mean the same to a process with another working folder."""
    from ...proto.checkpoint.urls import absolute

    return [absolute(root) for root in roots or ()]


DEFAULT_PORT = 7000
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_SERVING = "127.0.0.1:7100"

# The fields of a cluster that each shard has.
OF_A_SHARD = ("memory_budget", "ssd_path", "ssd_bytes", "ssd_engine", "ssd_direct_io", "sweep_every", "io_threads")

ModelRoot = Annotated[str, typer.Option("--root", help="Path or URL of the folder of published models.")]
Serving = Annotated[str, typer.Option(help="HOST:PORT of the gRPC servers of serving processes, with commas.")]
Modulo = Annotated[
    int | None,
    typer.Option(min=1, help="Divisor when the row is at key % MODULO: the rows of the table in model.args.rows."),
]
PagePort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Port of the page for browsers, on the same host; 0: any free one. Default: no page."
    ),
]
# A parent process passes the whole cluster section in this option.
ClusterJson = Annotated[str | None, typer.Option(hidden=True)]
DieWithParent = Annotated[int, typer.Option(hidden=True, callback=_follow_parent)]
