"""A worker whose every commit takes one from each row, so that rows tell how many commits they have had.

    python counting_worker.py COORDINATOR SECURITY RANK WORLD_SIZE STALENESS ROWS STOP_FILE KEEP_URL

STALENESS "none": no clock. Rank 0 has the cluster keep its rows in KEEP_URL, every second, but for STALENESS 0. Ends
when STOP_FILE is there. Prints "joined", "acknowledged N" after each commit that every shard has answered, and
"done N".
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import sparserow as sr

STEP_SEC = 0.02


class Counted(nn.Module):
    """One table, ``rows``."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, 4)


def main() -> None:
    """Steps until it is told to stop."""
    coordinator, security, rank, world_size, staleness, rows, stop, keep = sys.argv[1:]
    torch.set_num_threads(1)
    session = sr.connect(
        coordinator,
        "hosts",
        staleness=None if staleness == "none" else int(staleness),
        grad_scale="sum",
        rank=int(rank),
        world_size=int(world_size),
        security=security,
        deadline_sec=60.0,
    )
    with session:
        table = sr.Table(init=sr.Constant(0.0))
        model = session.distribute(Counted(int(rows)), optimizer=sr.optim.SGD(lr=1.0), min_rows=1, tables={"*": table})
        if rank == "0" and staleness != "0":
            session.keep_rows(keep, every_sec=1.0)
        print("joined", flush=True)
        ids, acknowledged = torch.arange(int(rows)), 0
        while not Path(stop).exists():
            model.rows(ids).sum().backward()
            session.step()
            session.flush()
            acknowledged += 1
            print(f"acknowledged {acknowledged}", flush=True)
            time.sleep(STEP_SEC)
        print(f"done {acknowledged}", flush=True)


if __name__ == "__main__":
    main()
