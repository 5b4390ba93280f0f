"""Tables into a pipe are whole."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from sparserow.deploy.commands.terminal import tables_console


def test_nothing_is_cut_or_broken_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    table = Table("address", "created", "card")
    row = ("a-host-with-a-long-name.of-a-cluster.example.org:7000", "2026-11-23T19:33:26+00:00", "step 24, " * 30)
    table.add_row(*row)
    tables_console().print(table)
    for cell in row:
        assert cell.strip() in pipe.getvalue()
