"""Reads from the launcher how few nodes a run may have, so that bad ones can be left out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def least_nodes(command: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Returns MIN of torchrun's ``--nnodes MIN:MAX``; None when the launcher is another program than torchrun.

    torch reads the command line itself, since it takes abbreviations and the variable ``PET_NNODES`` too.

    Args:
        command: the command line of the agent that started this process.
        environment: the environment that the agent passed on.
    """
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    start = _first_argument(command)
    if start is None:
        return None
    arguments = list(command[start:])
    is_given = any(word.split("=")[0].startswith("--nn") for word in arguments)
    try:
        nnodes = get_args_parser().parse_known_args(arguments)[0].nnodes
        if not is_given and "PET_NNODES" in environment:
            nnodes = environment["PET_NNODES"]
        least, _ = parse_min_max_nnodes(nnodes)
    except (Exception, SystemExit):  # a command line that this torch does not read
        return None
    return int(least)


def agent_command() -> list[str]:
    """Returns the command line of the process that started this one; [] where it cannot be read."""
    try:
        text = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in text.split(b"\0")[:-1]]


def _first_argument(command: Sequence[str]) -> int | None:
    """Returns the place of torchrun's first argument: ``torchrun ...`` or ``python -m torch.distributed.run ...``."""
    for at, word in enumerate(command[:8]):
        if Path(word).name == "torchrun" or (word in _MODULES and at and command[at - 1] == "-m"):
            return at + 1
        if Path(word).parts[-3:] in (("torch", "distributed", "run.py"), ("torch", "distributed", "launch.py")):
            return at + 1
    return None
