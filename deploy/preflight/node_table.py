"""Shows the verdict of a check of nodes, as a table for people and as values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from .node_verdict import Verdict

_COLORS = {"ok": "green", "slow": "yellow", "broken": "red", "unproven": "red"}


def node_table(verdict: Verdict) -> Table:
    """Returns a table with a line for each node: its times in seconds, its state, and why it is in that state."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("node", "matrices", "exchange", "disk", "state", "why"):
        table.add_column(title)
    for node in verdict.nodes:
        times = ["-" if value is None else f"{value:.3g} s" for value in node.seconds.values()]
        table.add_row(node.name, *times, f"[{_COLORS[node.state]}]{node.state}[/]", ", and ".join(node.reasons))
    return table


def node_values(verdict: Verdict) -> dict[str, Any]:
    """Returns ``{"nodes": [...], "bad": [...]}`` for JSON: all nodes, and the indexes of those that are not ok."""
    return {**asdict(verdict), "bad": list(verdict.bad)}
