"""``sparserow bench NAME``: measures one layer against a reference in the same run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.errors import InvalidArgument

if TYPE_CHECKING:
    from ..bench.harness import Figure


class Benchmark(str, Enum):
    """The benchmarks; each is a module of ``deploy/bench/`` with ``run_NAME(size)``, ``FULL`` and ``QUICK``.

    A benchmark that takes long yields its figures one by one.
    """

    engine = "engine"
    optimizers = "optimizers"
    wire = "wire"
    lookup = "lookup"
    tls = "tls"
    train = "train"
    observe = "observe"
    staleness = "staleness"
    cache = "cache"
    tiers = "tiers"
    sweeps = "sweeps"
    big_table = "big_table"
    serving = "serving"
    checkpoint = "checkpoint"
    scale = "scale"
    gpu = "gpu"
    reader = "reader"
    zoo = "zoo"
    own_model = "own_model"


def _run(name: str, quick: bool, rows: int | None) -> Iterable[Figure]:
    module = import_module(f"...deploy.bench.{name}", __package__)
    size = module.QUICK if quick else module.FULL
    if rows is not None:
        if not hasattr(size, "rows"):
            raise InvalidArgument(f"--rows: bench {name} has no table of that kind; leave it out")
        size = replace(size, rows=rows)
    figures: Iterable[Figure] = getattr(module, f"run_{name}")(size)
    return figures


def bench(
    name: Annotated[Benchmark, typer.Argument(help="What to measure.", show_default=False)],
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="File to write the figures to: metric, value, unit, limit, ratio."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small sizes, to see that it works; the figures are not comparable.")
    ] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1000, help="Rows of the table, where the benchmark has one. Default: the benchmark's choice."),
    ] = None,
) -> None:
    """Measure one layer, by name, against a reference in the same run."""
    from rich.console import Console

    from ..bench.harness import line_of, show, write_json

    if json_file is not None and not json_file.parent.is_dir():
        raise InvalidArgument(f"--json {json_file}: the folder of the file does not exist; create it first")
    given = _run(name.value, quick, rows)
    comes_by_parts = not isinstance(given, Sequence)
    figures: list[Figure] = []
    for figure in given:
        figures.append(replace(figure, limit=None) if quick else figure)
        if comes_by_parts:  # figures are kept when the command is interrupted
            typer.echo(line_of(figures[-1]), err=True)
            if json_file is not None:
                write_json(json_file, figures)
    title = f"bench {name.value}" + (" (quick: small sizes, not for judging)" if quick else "")
    show(title, figures, Console())
    if json_file is not None:
        write_json(json_file, figures)
