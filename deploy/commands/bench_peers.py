"""``sparserow bench peers``: other systems at the same work, each in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.process.whole_file import write_whole
from .bench_outcome import check_folder, report_missed

if TYPE_CHECKING:
    from ..bench.peers_run import PeersReport

Only = Annotated[str | None, typer.Option(help="Peers to measure, such as redis,tfra. Default: all.")]
Python = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        help="Python to make environments from, beside the one that runs this; may be repeated. Some peers need an "
        "older one.",
    ),
]
Environments = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the peers' environments and of their output. Default: sparserow/peers in the user's cache "
        "folder."
    ),
]
Write = Annotated[Path | None, typer.Option(help="File to write a page with the table to, in Markdown.")]


def measure_peers(
    *,
    only: str | None,
    python: list[str] | None,
    environments: Path | None,
    json_file: Path | None,
    page: Path | None,
    quick: bool,
    strict: bool,
) -> None:
    """Measures, prints the figures, and writes the files after each contest.

    Raises:
        InvalidArgument: a peer, a Python or the folder of a file does not exist.
        Exit: with status 1, when the process of a peer failed, or with ``strict`` when a figure misses its limit.
    """
    from rich.console import Console

    from ..bench.harness import show, write_json
    from ..bench.peer_contests import FULL, QUICK
    from ..bench.peer_environments import default_folder, interpreters
    from ..bench.peers_report import page_of, peer_figures
    from ..bench.peers_run import chosen, run_peers

    for option, path in (("--json", json_file), ("--write", page)):
        check_folder(option, path)
    peers, known = chosen(only), interpreters(python or [])
    folder = (environments or default_folder()).absolute()
    figures = []
    for report in run_peers(QUICK if quick else FULL, peers, folder, known):
        figures = peer_figures(report)
        if json_file is not None:
            write_json(json_file, figures)
        if page is not None:
            write_whole(page, page_of(report))
    show("bench peers" + (" (quick: small sizes, not for judging)" if quick else ""), figures, Console())
    _report_absent(report)
    report_missed(figures, strict=strict)
    if report.failed:
        raise typer.Exit(1)


def _report_absent(report: PeersReport) -> None:
    for name, error in report.skipped.items():
        typer.echo(f"skipped: {name}: {error}")
    for (name, contest), error in report.failed.items():
        typer.echo(f"failed: {name}, {contest}: {error}")
