"""The part ``--nodes`` of ``sparserow doctor``, which checks all nodes of torchrun or of Ray at once."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from ...proto.errors import InvalidArgument
from ..preflight.node_check import CheckSettings
from ..preflight.node_meeting import NodeMeeting, NodePlace
from ..preflight.node_table import node_table, node_values
from ..preflight.node_verdict import Verdict
from .result_file import write_result
from .terminal import tables_console

_TORCHRUN = "torchrun --nnodes N --nproc-per-node 1 --no-python sparserow doctor --nodes"


def check_all_nodes(settings: CheckSettings, json_file: Path | None) -> None:
    """Checks the nodes of the launcher, and prints a line for each on node 0.

    Args:
        settings: the settings of the check.
        json_file: the file that node 0 writes the verdict to; None writes none.

    Raises:
        InvalidArgument: neither torchrun nor Ray started this process, or torchrun started several on this node.
        Exit: a node is slow or broken; the exit code is 1 on every node.
    """
    place = NodePlace.from_environment()
    if place is not None and place.local_world != 1:
        raise InvalidArgument(
            f"--nodes: needs one process a node, and torchrun started {place.local_world} on this one; allowed: "
            "--nproc-per-node 1"
        )
    if place is not None:
        verdict = NodeMeeting(place, settings).check().verdict
    elif "RAY_ADDRESS" in os.environ:
        verdict = _on_ray(settings)
    else:
        raise InvalidArgument(
            f"--nodes: needs torchrun or Ray, which start a process on each node; start `{_TORCHRUN}` on each node, or "
            "set RAY_ADDRESS, as `ray job submit` does"
        )
    if place is None or place.node == 0:
        tables_console().print(node_table(verdict))
        write_result(json_file, node_values(verdict))
        bad, count = len(verdict.bad), len(verdict.nodes)
        typer.echo(f"{bad} of {count} nodes are slow or broken" if bad else f"all {count} nodes are ok")
    if verdict.bad:
        raise typer.Exit(1)


def _on_ray(settings: CheckSettings) -> Verdict:
    from ..ray.checked_nodes import check_ray_nodes
    from ..ray.foreground import connected

    with connected(os.environ["RAY_ADDRESS"], "RAY_ADDRESS"):
        return check_ray_nodes(settings).verdict
