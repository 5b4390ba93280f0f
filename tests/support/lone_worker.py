"""A worker as a process of its own, to be killed or stopped: joins, commits in two phases, and says what it does.

    python lone_worker.py COORDINATOR JOB RANK WORLD_SIZE STALENESS STEPS HOLD_AT SHARD_PORTS KIND

Each step adds -1 to every row (gradients of one, summed). SHARD_PORTS "a,b" stand in for the shards' own, 0 for none.
KIND "key": its commits have no step, as pushes by key; "step": they have.
Between PREPARE and COMMIT of step HOLD_AT it waits for a line on its standard input; -1 for none.
Prints "joined", "prepared STEP", "committed STEP", and at the end "done", or the name of the error.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from sparserow.cpp_ext import _client
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import Fenced, SparserowError, error_of

KEYS = np.arange(64, dtype=np.uint64)
DIM = 4
TABLE_NAME = "rows"


def main() -> None:
    """Runs until its steps are done, or an error ends it."""
    coordinator, job, rank, world_size, staleness, steps, hold_at, ports, kind = sys.argv[1:]
    _client.set_error_factory(error_of)
    with ControlClient(coordinator) as control:
        table = next(table for table in control.list_tables("death") if table.name == TABLE_NAME)
        identity = control.register_worker(
            namespace="death",
            job=job,
            rank=int(rank),
            world_size=int(world_size),
            staleness=int(staleness),
            deadline_sec=30.0,
        )
        view = control.cluster()
        stand_ins = [int(port) for port in ports.split(",")]
        client = _client.Client(
            shards=[(shard.host, port or shard.port) for shard, port in zip(view.shards, stand_ins, strict=True)],
            slot_owner=view.slot_owner,
            route_epoch=view.route_epoch,
            cluster_id=view.cluster_id,
            job_id=identity.job_id,
            worker_id=identity.worker_id,
            worker_epoch=identity.epoch,
            worker_proof=identity.proof,
        )
        say("joined")
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(identity.lease_sec / 5):
                try:
                    control.heartbeat_worker(identity)
                except Fenced:
                    return
                except SparserowError:  # not answered in time: the next one may be
                    continue

        threading.Thread(target=beat, daemon=True).start()
        grads = np.ones((len(KEYS), DIM), np.float32)
        try:
            for step in range(identity.first_step, int(steps)):
                commit = {"sequence": step + 1, "grad_sum": True} | ({"step": step} if kind == "step" else {})
                client.pull(table.id, KEYS, dim=DIM, step=step if kind == "step" else -1, deadline_ms=30_000)
                client.prepare(table.id, KEYS, grads, dim=DIM, lr=1.0, **commit)
                say(f"prepared {step}")
                if step == int(hold_at):
                    sys.stdin.readline()
                client.commit_prepared(**commit)
                say(f"committed {step}")
            control.deregister_worker(identity)
            say("done")
        except SparserowError as error:
            say(error.code)
        ended.set()


def say(what: str) -> None:
    """One line, at once."""
    print(what, flush=True)


if __name__ == "__main__":
    main()
