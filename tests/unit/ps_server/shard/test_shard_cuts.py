"""What a shard keeps of a cut, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shard_engine import lone_engine
from sparserow.cpp_ext import _server
from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import NotFound
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.shard.checkpoints import ShardCheckpoints
from sparserow.ps_server.shard.engine import ShardEngine

SLOTS = 64
TABLE = TableSchema("ads", "user", 2, SGD(lr=1.0), id=_server.id_of_name("ads/user"), version=1)
ROWS = 100


@pytest.fixture
def engine() -> Iterator[ShardEngine]:
    with lone_engine(slot_count=SLOTS) as engine:
        engine.note_owned(pb.Route(epoch=1, slot_count=SLOTS, runs=[pb.SlotRun(start=0, shard=0)]))
        engine.create_tables([TABLE])
        engine.store.assign(TABLE.id, np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, 2), np.float32))
        yield engine


def cut(checkpoints: ShardCheckpoints, save: str) -> None:
    checkpoints.cut(pb.CutRequest(save=save, deadline_ms=5000))


def dumped(checkpoints: ShardCheckpoints, folder: Path, save: str) -> int:
    (folder / save).mkdir()
    request = pb.DumpRequest(save=save, url=str(folder / save), part_bytes=1 << 20)
    return sum(part.rows for reply in checkpoints.dump(request) for part in reply.rows.parts)


def test_a_cut_that_nobody_asked_for_does_not_stand_in_the_way_of_the_next_save(
    engine: ShardEngine, tmp_path: Path
) -> None:
    checkpoints = ShardCheckpoints(engine)
    cut(checkpoints, "left")  # its coordinator is killed before it asks for the rows
    cut(checkpoints, "next")
    assert dumped(checkpoints, tmp_path, "next") == ROWS
    with pytest.raises(NotFound, match="no cut for save left"):
        dumped(checkpoints, tmp_path, "left")


def test_a_cut_that_was_ended_before_it_was_made_keeps_nothing(engine: ShardEngine, tmp_path: Path) -> None:
    checkpoints = ShardCheckpoints(engine)
    checkpoints.end("late")
    cut(checkpoints, "late")
    with pytest.raises(NotFound, match="no cut for save late"):
        dumped(checkpoints, tmp_path, "late")
    cut(checkpoints, "next")
    assert dumped(checkpoints, tmp_path, "next") == ROWS
