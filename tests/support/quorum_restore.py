"""One worker of a job with a quorum that saves, goes on, and goes back together with the others.

    python quorum_restore.py RANK COORDINATOR URL

Each step adds -1 to every dense weight, whoever its members are. Ten steps are saved, ten more are lost, and ten are
made after the restore; the weights must then be -20.
"""

from __future__ import annotations

import sys

import torch

import sparserow as sr
from quorum_worker import Net

WORKERS, QUORUM, STEPS = 3, 2, 10


def take_steps(session: sr.Session, model: torch.nn.Module, until: int) -> int:
    """Takes steps until the clock is there; returns how often this worker was a member."""
    taken = 0
    while session.current_step < until:
        model(torch.arange(8)).backward()
        taken += session.step()
    return taken


def main() -> None:
    """Saves, goes on, restores, goes on, and checks the weights."""
    torch.set_num_threads(1)
    rank, coordinator, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with sr.connect(coordinator, "restored", rank=rank, world_size=WORKERS, quorum=QUORUM) as session:
        tables = {"trace": sr.Table(init=sr.Constant(0.0))}
        model = session.distribute(Net(1000), optimizer=sr.optim.SGD(lr=1.0), min_rows=100, tables=tables)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=1.0))
        take_steps(session, model, STEPS)
        session.save(url)  # it returns when all workers have come here
        take_steps(session, model, 2 * STEPS)
        session.restore(url)
        begin = session.current_step
        assert begin >= 2 * STEPS, "no step of the clock before comes again"
        take_steps(session, model, begin + STEPS)
        with torch.no_grad():
            model(torch.arange(8))  # reads the weights under the clock
        assert (model.dense == -2 * STEPS).all(), model.dense
        session.discard()


if __name__ == "__main__":
    main()
