"""Rooms of lookups and of the session: no circle, no maker in the plan, few files between a forward and the op."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from rooms import ROOT, arrows_of, circles_of, floors_of, imported_modules
from sparserow.worker.lookups.makers import own_rank

LOOKUPS = ROOT / "worker" / "lookups"
FEW_LINES = 250
WITHOUT_CIRCLE = [
    *("worker", "worker/layers", "worker/lookups", "worker/lookups/makers", "worker/session", "worker/training"),
    *("proto", "proto/checkpoint", "proto/config", "proto/features", "proto/options"),
    *("cpp_ext/rpc", "deploy", "deploy/commands", "ps_server/coordinator", "serving"),
]


@pytest.mark.parametrize("room", WITHOUT_CIRCLE)
def test_files_of_a_room_have_no_circle(room: str) -> None:
    assert circles_of(*arrows_of(room)) == []


def test_a_circle_is_found_and_counts_as_one_floor() -> None:
    rooms = {"a", "b", "c", "d", "e"}
    chain = {("a", "b"), ("b", "c"), ("c", "d")}
    assert (circles_of(rooms, chain), floors_of(rooms, chain)) == ([], 4)
    circle = {*chain, ("d", "c"), ("e", "e")}
    assert (circles_of(rooms, circle), floors_of(rooms, circle)) == ([{"c", "d"}], 3)


def test_no_file_of_lookups_is_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in LOOKUPS.rglob("*.py")}
    assert len(lines) > 10
    assert not {name: count for name, count in lines.items() if count > FEW_LINES}


def test_the_plan_names_no_maker() -> None:
    makers = {path.stem for path in (LOOKUPS / "makers").glob("*.py")} - {"__init__"}
    assert makers >= {"own_rank", "tensor_group", "device_tables"}
    for path in LOOKUPS.glob("*.py"):
        named = {name for name in imported_modules(path) if name.startswith("worker/lookups/makers")}
        assert not named, f"{path.name} imports {named}"
    words = (LOOKUPS / "plan.py").read_text()
    assert not [maker for maker in makers if maker in words]


class Tables(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 4) for _ in range(tables))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids[:, column]) for column, table in enumerate(self.tables)]).sum()


def test_a_planned_pull_enters_few_files_before_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the call of the model to the op that pulls and makes the rows of all tables."""
    entered: dict[str, None] = {}
    called: list[int] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and not called and path.is_relative_to(ROOT / "worker"):
            entered[path.relative_to(ROOT).as_posix()] = None

    with sr.InProcessCluster().connect("files") as session:
        model = session.distribute(Tables(26), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        ids = torch.randint(0, 50, (8, 26), generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            model(ids).backward()
            session.step()
        gather_all = own_rank.ops.gather_all

        def counted(*arguments: Any) -> Any:
            called.append(len(arguments[0]))
            return gather_all(*arguments)

        monkeypatch.setattr(own_rank.ops, "gather_all", counted)
        sys.setprofile(note)
        try:
            model(ids)
        finally:
            sys.setprofile(None)
        session.discard()
    assert called == [26], "one op makes all rows, and none is made by its layer"
    assert list(entered) == [
        "worker/lookups/forward_hook.py",
        "worker/lookups/layer_watch.py",  # whether a layer was frozen since
        "worker/lookups/makers/own_rank.py",
        "worker/lookups/plan.py",
        "worker/data/batch_tensors.py",  # finds a tensor of the batch by its path
    ]
