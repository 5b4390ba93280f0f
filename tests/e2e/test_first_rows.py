"""Workers without a process group: whoever comes first, the tables begin with the weights of rank 0."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.worker.layers import weight_carry

ROWS, DIM = 400, 4

WORKER = f"""
import sys, time
import numpy as np, torch
from torch import nn
import sparserow as sr
from sparserow.worker.layers import layer_swap

address, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
carry = layer_swap.carry


def slow(*args):
    time.sleep(1)  # the other worker looks meanwhile
    carry(*args)


layer_swap.carry = slow
torch.manual_seed(rank)
with sr.connect(address, "ads", rank=rank, world_size=2, staleness=None, gather_sec=60) as session:
    time.sleep(0 if rank else 1)  # rank 1 comes first
    model = nn.Sequential(nn.Embedding({ROWS}, {DIM}))
    session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=10)
    with torch.no_grad():
        np.save(f"{{folder}}/{{rank}}.npy", model.eval()(torch.arange({ROWS})).numpy())
"""


@pytest.fixture
def address() -> Iterator[str]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster.address


def test_a_worker_that_comes_first_waits_for_the_weights_of_rank_0(address: str, tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, address, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [worker.wait(100) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    torch.manual_seed(0)
    weights = nn.Embedding(ROWS, DIM).weight.detach().numpy()
    for rank in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"{rank}.npy"), weights)


def test_a_table_that_no_shard_has_heard_of_yet_is_waited_for(address: str) -> None:
    """The coordinator has a table on record before the last shard has it."""
    with sr.connect(address, "ads", staleness=None) as session:
        recorded = session.create_table("0", dim=DIM, optimizer=sr.optim.SGD(lr=0.1)).schema
        session.drop_table("0")
        with pytest.raises(sr.errors.NotFound):
            session.core._rows_of(recorded).pull([1])
        assert not weight_carry.is_unfinished(session, recorded)
