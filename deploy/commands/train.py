"""``sparserow train``: trains the model of a job file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Exit codes of runs that have ended.
NOT_PUBLISHED = 3  # the model could not be published
WORKERS_LOST = 4  # workers were killed, and what they had still to train on was left out


def train(
    job: Annotated[Path, typer.Argument(help="The job file (YAML); docs/configuration.md lists its keys.")],
    *,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY.KEY=VALUE that replaces the value in the file; may be repeated."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of worker processes, which replaces train.workers.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the result to.")] = None,
    resume: Annotated[
        str,
        typer.Option(
            help="auto: continue from the newest checkpoint in train.checkpoint.url, also when a process ends; never; "
            "or the name of a checkpoint."
        ),
    ] = "never",
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Folder of another run's checkpoints, or one of them: begin with its rows, tower, optimizers and "
            "schedules, over the job's own files. It replaces train.checkpoint.start_from.",
        ),
    ] = None,
    overwrite_checkpoints: Annotated[
        bool,
        typer.Option("--overwrite-checkpoints", help="Remove the checkpoints of other runs from the job's folders."),
    ] = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Read one batch, try the forward on it, show tensors, tables and a step; train nothing.",
        ),
    ] = False,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="File to write a trace for Perfetto to; with train.dense ps also FILE.1, FILE.2, ..."
        ),
    ] = None,
) -> None:
    """Train a model on a click log, with an own or a running cluster, and one or several workers.

    Under torchrun each process is one worker. Without cluster.address a cluster runs for the duration of the job.
    """
    from rich.console import Console

    from ...proto.config.job import JobConfig
    from ...proto.options.document import load_config
    from ..train.checked_nodes import checked_place
    from ..train.training_display import next_commands, summary
    from ..train.training_job import check_overwrites, checked_resume, run_job, torchrun_place
    from .result_file import check_result_file, write_result

    count = [] if workers is None else [f"train.workers={workers}"]
    started = [] if start_from is None else [f"train.checkpoint.start_from={start_from}"]
    config = load_config(JobConfig, job, [*(assignments or ()), *count, *started])
    check_result_file(json_file)
    check_result_file(trace_file, "--trace")
    if dry:
        from dataclasses import asdict

        from ..train.dry_run import dry_run
        from ..train.dry_run_display import show

        made = dry_run(config)
        show(made)
        write_result(json_file, asdict(made))
        return
    check_overwrites(config, resume, overwrites=overwrite_checkpoints)
    begin = checked_resume(config, resume)
    with checked_place(config, torchrun_place()) as checked:
        if checked.is_left_out:
            return
        result = run_job(config, checked.place, trace_file, resume=begin, overwrites=overwrite_checkpoints)
        if checked.place is None or checked.place.rank == 0:
            console = Console()
            console.print(summary(f"trained {config.name}", result))
            for line in next_commands(result):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            write_result(json_file, result.as_dict())
            if result.problem:
                typer.echo(f"sparserow: {result.problem}", err=True)
                raise typer.Exit(NOT_PUBLISHED)
            if result.workers_lost:
                raise typer.Exit(WORKERS_LOST)
