"""``sparserow train``: trains the model of a job file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...proto.config.job import JobConfig

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
            help="Folder of another run's checkpoints, or one of them, or a version in publish.root (ctr@live): begin "
            "with its rows, tower, optimizers and schedules, over the job's own files. It replaces "
            "train.checkpoint.start_from, or that of train.elastic.",
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="What may differ from --from: TABLE.dim, TABLE.dtype, TABLE.optimizer, with * for every table, or "
            "tower; may be repeated. It replaces train.checkpoint.accept."
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
    from ..train.version_start import with_known_start
    from .result_file import check_result_file, write_result

    count = [] if workers is None else [f"train.workers={workers}"]
    given = [*(assignments or ()), *count]
    if start_from is not None or accept:
        section = "checkpoint" if load_config(JobConfig, job, given).train.elastic is None else "elastic"
        given += [] if start_from is None else [f"train.{section}.start_from={start_from}"]
        given += [f"train.{section}.accept={accept}"] if accept else []
    config = with_known_start(load_config(JobConfig, job, given))
    check_result_file(json_file)
    check_result_file(trace_file, "--trace")
    if dry:
        from dataclasses import asdict

        from ..train.dry_run import dry_run
        from ..train.dry_run_display import show

        made = dry_run(config.of_first_day)
        show(made)
        write_result(json_file, asdict(made))
        return
    check_overwrites(config, resume, overwrites=overwrite_checkpoints)
    begin = checked_resume(config, resume)
    if config.data.days is not None:
        _train_days(config, trace_file, json_file, resume=begin, overwrites=overwrite_checkpoints)
        return
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


def _train_days(
    config: JobConfig, trace_file: Path | None, json_file: Path | None, *, resume: str, overwrites: bool
) -> None:
    """Trains the days of a job, shows each, and writes the results of all of them."""
    from rich.console import Console

    from ...proto.errors import InvalidArgument
    from ..train.days import run_days
    from ..train.training_display import next_commands, summary
    from ..train.training_job import torchrun_place
    from .result_file import write_result

    if torchrun_place() is not None:
        raise InvalidArgument(
            "data.days: is not possible under torchrun; start a run a day, with --from the day before"
        )
    if resume not in ("auto", "never"):
        raise InvalidArgument(f"--resume {resume}: data.days goes on where it was; allowed: auto, never")
    if overwrites:
        raise InvalidArgument(
            "--overwrite-checkpoints: is not possible with data.days; name another train.checkpoint.url"
        )
    console, days = Console(), []
    for each in run_days(
        config, trace_file, resume=resume, note=lambda line: typer.echo(f"sparserow: {line}", err=True)
    ):
        console.print(summary(f"trained {config.name}, {each.day}", each.result))
        for line in next_commands(each.result):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        days.append({"day": each.day.isoformat(), **each.result.as_dict()})
        write_result(json_file, {"days": days})
        if each.result.problem:
            typer.echo(f"sparserow: {each.result.problem}", err=True)
            raise typer.Exit(NOT_PUBLISHED)
    if not days:
        typer.echo("sparserow: all days that are there were done before", err=True)
