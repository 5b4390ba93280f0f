"""A worker process of a job, which ``job_workers`` starts; it is not meant for users.

It reads one line of JSON from the socket whose descriptor is its argument, trains, and answers with one line:
``{"result": {...}}`` or ``{"error": NUMBER, "message": TEXT, ...}``. An error has a traceback, which is shown with
``--debug`` (``cause``) or always (``trace``). The process ends when the other end of the socket is closed, so it never
outlives its parent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...proto.config.job import JobConfig
from ...proto.errors import Internal, SparserowError
from ...proto.options.document import validate
from ...proto.process.startup import begin_start
from ...proto.security.security import use_security


def main() -> None:
    """The entry point of the process: ``python -m ...worker_process DESCRIPTOR``."""
    begin_start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with socket.socket(fileno=int(sys.argv[1])) as link:
        line = link.makefile("rb").readline()
        if not line:
            return
        threading.Thread(target=_end_with_parent, args=(link,), daemon=True).start()
        answer = _train(json.loads(line))
        link.sendall(json.dumps(answer).encode() + b"\n")
        # The parent closes its end when it has read the answer; peers may still need this process until then.
        code = 0 if "result" in answer else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent(link: socket.socket) -> None:
    while link.recv(4096):
        pass
    os._exit(1)


def _train(order: dict[str, Any]) -> dict[str, Any]:
    from ...worker.training.process_group import joined_group
    from ...worker.training.run_identity import RunIdentity
    from ...worker.training.training_device import training_device
    from .training_display import TrainingDisplay
    from .training_run import run_worker

    try:
        use_security(order["security"])
        job = validate(JobConfig, order["job"])
        rank, world = order["rank"], order["world"]
        with (
            joined_group(
                rank,
                world,
                order["init_method"],
                device=training_device(job.train, local_rank=rank, local_world=world, world=world),
                timeout=timedelta(seconds=job.train.timeout),
            ) as group,
            TrainingDisplay(
                job.train.epochs, silent=rank != 0, of_worker=rank if job.train.dense == "ps" and world > 1 else None
            ) as display,
        ):
            result = run_worker(
                job,
                group,
                local_world=world,
                coordinator=order["coordinator"],
                observer=display,
                trace_file=None if order["trace_file"] is None else Path(order["trace_file"]),
                resume=order["resume"],
                run=order["run"],
                identity=RunIdentity(**order["identity"]),
            )
        return {"result": result.as_dict()}
    except SparserowError as error:
        return {"error": error.number, "message": str(error), "cause": traceback.format_exc()}
    except Exception as error:
        # Another worker's end has often caused this error. The parent prints it when no worker gave an error of the
        # taxonomy.
        return {
            "error": Internal.number,
            "message": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }


if __name__ == "__main__":
    main()
