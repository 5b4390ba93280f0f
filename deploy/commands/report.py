"""``sparserow report``: draws the curves of a run that ``metrics.file`` has written down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="File that metrics.file of the job names.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Page to write. Default: beside the file, with the ending .html.")
    ] = None,
) -> None:
    """Draw the loss and the metrics of a run as one page that needs no network.
    docs/job-metrics.md has the lines of the file.
    """
    from ...proto.process.whole_file import write_whole
    from ..train.run_page import page_of
    from ..train.run_report import read_run
    from .result_file import check_result_file

    target = out if out is not None else run.with_suffix(".html")
    check_result_file(target, "--out")
    page = page_of(read_run(run), run.name)
    write_whole(target, page)
    typer.echo(f"wrote {target}")
