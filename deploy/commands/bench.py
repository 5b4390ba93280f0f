"""``sparserow bench``: measures one layer against a reference in the same run, all of them, or compares figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.errors import FailedPrecondition, InvalidArgument
from ...proto.process.startup import end_start
from ...proto.process.whole_file import write_whole
from ..launch.termination import interrupted_by_termination
from .bench_outcome import check_folder, report_missed
from .bench_peers import Environments, Only, Python, Write, measure_peers

if TYPE_CHECKING:
    from ..bench.harness import Figure

# Each is a module of ``deploy/bench/`` with ``run_NAME(size)``, ``FULL`` and ``QUICK``. A benchmark that takes long
# yields its figures one by one.
BENCHMARKS: Mapping[str, str] = MappingProxyType(
    {
        "engine": "Pulls and pushes of the row store, against flat arrays.",
        "optimizers": "A push with each optimizer, against a loop over flat arrays.",
        "wire": "Pulls and pushes between processes, against raw TCP.",
        "lookup": "A small pull, against raw TCP.",
        "tls": "Pulls and pushes with TLS, against OpenSSL that moves the same bytes.",
        "train": "A step of a recommendation model, against torch's sparse training.",
        "own_model": "A class trained by its job file, against DDP with local layers.",
        "observe": "A step that is observed by metrics and traces, against one that is not.",
        "staleness": "Workers that wait for each other, by the staleness that is allowed.",
        "cache": "What a row cache saves of pulled bytes.",
        "tiers": "Rows on the SSD, against rows in memory.",
        "sweeps": "Sweeps of a large table, and what requests wait meanwhile.",
        "big_table": "A table larger than the memory.",
        "serving": "Lookups and the sync of the serving store, against raw TCP and Redis.",
        "loop": "From an event of a topic to its served row.",
        "stream": "A model that learns day after day, against the same in torch.",
        "checkpoint": "Saves and restores, against the disk.",
        "scale": "The cost of a row by numbers of shards and workers.",
        "gpu": "A step with rows on shards, against torch's on the device.",
        "counted": "Operations, copies and Python's time of a step on a device, counted without one.",
        "reader": "The reader of files, against a scan by Arrow.",
        "zoo": "AUC and ranking of each model of the zoo, against plain torch.",
    }
)

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="File to write the figures to.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Use small sizes, to see that it works; the figures are not comparable.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with status 1 where a figure misses its limit.")]
Rows = Annotated[
    int | None,
    typer.Option(min=1000, help="Rows of the table, where the benchmark has one. Default: the benchmark's choice."),
]


@app.callback()
def bench(context: typer.Context) -> None:
    """Measure one layer against a reference in the same run, all layers, or compare two files of figures."""
    if find_spec("...cpp_ext._bench", __package__) is None:
        raise FailedPrecondition(
            "bench: benchmarks run in a checkout, and this installation is none; clone sparserow's repository, "
            "run 'make setup' in it, and then '.venv/bin/sparserow bench'"
        )
    context.with_resource(interrupted_by_termination())


def _run(name: str, quick: bool, rows: int | None) -> Iterable[Figure]:
    module = import_module(f"...deploy.bench.{name}", __package__)
    end_start()  # as a user's process, a benchmark collects garbage by Python's own rule
    size = module.QUICK if quick else module.FULL
    if rows is not None:
        if not hasattr(size, "rows"):
            raise InvalidArgument(f"--rows: bench {name} has no table of that kind; leave it out")
        size = replace(size, rows=rows)
    figures: Iterable[Figure] = getattr(module, f"run_{name}")(size)
    return figures


def _measure(name: str, json_file: Path | None, *, quick: bool, rows: int | None, strict: bool) -> None:
    from rich.console import Console

    from ..bench.harness import line_of, show, write_json

    check_folder("--json", json_file)
    given = _run(name, quick, rows)
    comes_by_parts = not isinstance(given, Sequence)
    figures: list[Figure] = []
    for figure in given:
        figures.append(replace(figure, limit=None) if quick else figure)
        if comes_by_parts:  # figures are kept when the command is interrupted
            typer.echo(line_of(figures[-1]), err=True)
            if json_file is not None:
                write_json(json_file, figures)
    show(f"bench {name}" + (" (quick: small sizes, not for judging)" if quick else ""), figures, Console())
    if json_file is not None:
        write_json(json_file, figures)
    report_missed(figures, strict=strict)


def _command_of(name: str) -> Callable[..., None]:
    def measure(json_file: JsonFile = None, quick: Quick = False, rows: Rows = None, strict: Strict = False) -> None:
        _measure(name, json_file, quick=quick, rows=rows, strict=strict)

    return measure


for _name, _help in BENCHMARKS.items():
    app.command(_name, help=_help)(_command_of(_name))


@app.command("all")
def all_(
    json_file: JsonFile = None,
    *,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often each benchmark runs.")] = 3,
    only: Annotated[str | None, typer.Option(help="Benchmarks to run, such as engine,wire. Default: all.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Run those too that take a good part of an hour.")] = False,
    quick: Quick = False,
    strict: Strict = False,
    plot: Annotated[Path | None, typer.Option(help="File to draw the ratios into, as SVG.")] = None,
) -> None:
    """Run the benchmarks in turns, and sum up their figures.

    With --json it can be taken up again: runs that the file has are not run again.
    """
    from rich.console import Console

    from ..bench.ratio_plot import ratio_svg
    from ..bench.suite import LONG, check_names, expected, left_of, open_suite, run_suite, show_summary, summed_up

    for option, path in (("--json", json_file), ("--plot", plot)):
        check_folder(option, path)
    names = [name for name in BENCHMARKS if long or name not in LONG]
    names = names if only is None else check_names(only, list(BENCHMARKS))
    suite = open_suite(json_file, quick=quick)
    left = left_of(suite, names, rounds)
    typer.echo(", ".join(f"{name}: {value}" for name, value in suite.machine.items()))
    typer.echo(expected(suite, left))
    failed = []
    for done, run in enumerate(run_suite(suite, left, json_file), start=1):
        typer.echo(
            f"{run.benchmark}, round {run.round + 1}: {run.error or 'done'} ({run.minutes:.1f} minutes); "
            f"{expected(suite, left[done:])}"
        )
        failed += [run.benchmark] if run.error else []
    summary = [each for each in summed_up(suite.runs) if each.benchmark in names]
    show_summary(f"bench all, {rounds} rounds" + (" (quick: not for judging)" if quick else ""), summary, Console())
    if plot is not None:
        write_whole(plot, ratio_svg(summary))
    if failed:
        typer.echo(f"failed: {', '.join(sorted(set(failed)))}", err=True)
    report_missed([each.figure for each in summary], strict=strict)
    if failed:
        raise typer.Exit(1)


@app.command("peers")
def peers(
    json_file: JsonFile = None,
    *,
    only: Only = None,
    python: Python = None,
    environments: Environments = None,
    write: Write = None,
    quick: Quick = False,
    strict: Strict = False,
) -> None:
    """Measure other systems at the same work, each in an environment of its own.

    Environments are made on first use, by pip. A peer that cannot be installed is skipped, with the reason.
    """
    measure_peers(
        only=only,
        python=python,
        environments=environments,
        json_file=json_file,
        page=write,
        quick=quick,
        strict=strict,
    )


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="File of figures, as --json writes it.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="Another one.", show_default=False)],
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 where a figure became worse.")] = False,
) -> None:
    """Show the figures that moved by more than 5 % and by more than they differ from run to run."""
    from rich.console import Console

    from ..bench.comparison import compared, figures_of, lacking, show_moves

    old, new = figures_of(before), figures_of(after)
    moves = compared(old, new)
    moved = [move for move in moves if move.has_moved]
    show_moves(moved, Console())
    typer.echo(f"{len(moved)} of {len(moves)} figures moved")
    for metric in lacking(old, new):
        typer.echo(f"only in one file: {metric}")
    if strict and any(not move.is_better for move in moved):
        raise typer.Exit(1)
