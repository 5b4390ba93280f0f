"""Reads arguments of a published program from a CSV file, and formats its outputs as lines."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...proto.errors import InvalidArgument, NotFound
from .program_inputs import ProgramInput

_COLUMN = re.compile(r"(?P<name>.+?)(?:\[(?P<index>\d+)\])?")


def read_batches(path: Path, inputs: Sequence[ProgramInput], batch_rows: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields arguments of a program from a CSV file, one batch at a time.

    A column ``ids`` fills an argument of one dimension. Columns ``ids[0]``, ``ids[1]``, ... fill an argument of two.

    Args:
        path: the path of the file.
        inputs: the arguments of the program.
        batch_rows: the number of rows of a batch; the last batch may have fewer.

    Raises:
        NotFound: the file does not exist.
        InvalidArgument: the columns do not match the program's arguments, or a value is not a number; the text has the
            line and the column.
    """
    try:
        file = path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise NotFound(f"--input {path}: {error.strerror}") from None
    with file:
        lines = csv.reader(file)
        header = next(lines, None)
        if header is None:
            raise InvalidArgument(f"{path}: the file is empty; its first line must name the columns")
        places = [_places(path, header, wanted) for wanted in inputs]
        known = {at for place in places for at in place}
        unknown = next((header[at] for at in range(len(header)) if at not in known), None)
        if unknown is not None:
            names = ", ".join(wanted.name for wanted in inputs)
            raise InvalidArgument(f"{path}: column {unknown!r} is no argument of the program; its arguments: {names}")
        rows: list[list[str]] = []
        for line in lines:
            if len(line) != len(header):
                raise InvalidArgument(
                    f"{path}:{lines.line_num}: the line has {len(line)} fields, but the first line has {len(header)}"
                )
            rows.append(line)
            if len(rows) == batch_rows:
                yield _tensors(path, lines.line_num - len(rows) + 1, header, rows, inputs, places)
                rows = []
        if rows:
            yield _tensors(path, lines.line_num - len(rows) + 1, header, rows, inputs, places)


def format_output(output: Any) -> Iterator[str]:
    """Yields a line for each row of a batch's output, with its values separated by commas.

    Several outputs follow each other, those of a mapping in its order.
    """
    if isinstance(output, Mapping):
        output = list(output.values())
    tensors = list(output) if isinstance(output, tuple | list) else [output]
    columns = [part.reshape(part.shape[0], -1) for part in tensors if isinstance(part, torch.Tensor)]
    for row in torch.cat([column.to(torch.float64) for column in columns], dim=1).tolist():
        yield ",".join(f"{value:.7g}" for value in row)


def _places(path: Path, header: Sequence[str], wanted: ProgramInput) -> list[int]:
    """Returns the positions of an argument's columns, in order."""
    if len(wanted.shape) not in (1, 2):
        raise InvalidArgument(
            f"argument {wanted.name!r} has {len(wanted.shape)} dimensions; a CSV file can fill 1 or 2"
        )
    found: dict[int, int] = {}
    for at, column in enumerate(header):
        match = _COLUMN.fullmatch(column.strip())
        if match is not None and match["name"] == wanted.name and (match["index"] is None) == (len(wanted.shape) == 1):
            found[int(match["index"] or 0)] = at
    width = 1 if len(wanted.shape) == 1 else wanted.shape[1] or len(found)
    missing = next((i for i in range(width) if i not in found), None)
    if missing is not None or len(found) != width or not found:
        name = wanted.name if len(wanted.shape) == 1 else f"{wanted.name}[{missing or 0}]"
        raise InvalidArgument(f"{path}: there is no column {name!r}, which the program needs")
    return [found[i] for i in range(width)]


def _tensors(
    path: Path,
    first_line: int,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    inputs: Sequence[ProgramInput],
    places: Sequence[Sequence[int]],
) -> tuple[torch.Tensor, ...]:
    tensors = []
    for wanted, columns in zip(inputs, places, strict=True):
        of = float if wanted.dtype.is_floating_point else int
        rows = []
        for number, line in enumerate(lines):
            try:
                rows.append([of(line[at]) for at in columns])
            except ValueError:
                bad = next(at for at in columns if not _is(of, line[at]))
                raise InvalidArgument(
                    f"{path}:{first_line + number}: column {header[bad]!r}: {line[bad]!r} is no {of.__name__}"
                ) from None
        tensor = torch.tensor(rows, dtype=wanted.dtype)
        tensors.append(tensor.reshape(-1) if len(wanted.shape) == 1 else tensor)
    return tuple(tensors)


def _is(of: type, text: str) -> bool:
    try:
        of(text)
    except ValueError:
        return False
    return True
