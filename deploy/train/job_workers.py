"""Starts the worker processes of a job on this machine and waits for their end.

When one worker fails, the others are stopped, and the most informative of their errors is raised. There are two
exceptions. With ``train.dense`` ps the others continue without a worker that was killed, unless it is worker 0, which
evaluates. With ``train.elastic`` a new worker replaces it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...proto.config.job import JobConfig
from ...proto.errors import (
    DeadlineExceeded,
    Fenced,
    Internal,
    SparserowError,
    Unavailable,
    error_of,
)
from ...proto.security.security import process_security
from ...worker.training.run_identity import RunIdentity
from ...worker.training.training_report import EpochResult, EvaluationPoint, TrainResult, merged

_LAST_WORDS_SEC = 2.0  # how long after a first error peers may report a more informative one
_STOP_SEC = 5.0
_CHECK_SEC = 0.5
# After these errors a new worker may succeed.
_PASSING = (Unavailable.number, DeadlineExceeded.number, Fenced.number, Internal.number)


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    link: socket.socket
    heard: bytearray = field(default_factory=bytearray)

    def answer(self) -> dict[str, Any]:
        """Returns the worker's answer, once its end of the link is closed."""
        if self.heard.endswith(b"\n"):
            said: dict[str, Any] = json.loads(self.heard)
            return said
        code = self.process.wait(_STOP_SEC)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        message = f"worker {self.rank} ended {how}; its messages are on stderr"
        return {"error": Unavailable.number, "message": message, "is_lost": True}


def run_job_workers(
    job: JobConfig,
    *,
    workers: int,
    coordinator: str | None,
    trace_file: Path | None = None,
    resume: str = "never",
    identity: RunIdentity,
    check: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Runs ``job`` on worker processes; all of them have ended when this returns or raises.

    Args:
        job: the job to train.
        workers: the number of worker processes.
        coordinator: ``HOST:PORT`` of the coordinator; None with backend local.
        trace_file: the file to which worker 0 writes a trace of the run; None records none.
        resume: where the workers begin, as in ``run_worker``.
        identity: the identity of the run, for its checkpoints.
        check: called at least every half second; an error that it raises ends the workers.

    Returns:
        The result of the job.

    Raises:
        SparserowError: the error of the worker that failed.
    """
    security, run = process_security().path, secrets.token_hex(8)
    elastic = job.train.elastic
    with tempfile.TemporaryDirectory(prefix="sparserow-job-") as folder, _started(workers) as team:

        def give_order(worker: _Worker, resume: str) -> None:
            order = {
                "job": job.model_dump(mode="json", exclude_unset=True),
                "rank": worker.rank,
                "world": workers,
                "init_method": None if job.train.dense == "ps" else f"file://{Path(folder) / 'meet'}",
                "coordinator": coordinator,
                "trace_file": None if trace_file is None else str(trace_file),
                "resume": resume,
                "security": None if security is None else str(security.resolve()),
                "run": run,
                "identity": asdict(identity),
            }
            with contextlib.suppress(BrokenPipeError):  # the worker has ended; its answer reports that
                worker.link.sendall(json.dumps(order).encode() + b"\n")

        for worker in team:
            give_order(worker, resume)
        replacements = _Replacements(team, give_order, 0 if elastic is None else elastic.max_restarts)
        answers = _listen(team, check, may_lose=job.train.dense == "ps", replacements=replacements)
    errors = [answer for answer in answers if "error" in answer]
    if errors:
        raise _first_cause(errors)
    results = [_result(answer["result"]) for answer in answers]
    if job.train.dense == "ddp":
        return results[0]
    # With leases another worker has what one that was lost left.
    return merged(results, workers_lost=workers - len(results) if elastic is None else 0)


class _Replacements:
    """Replaces workers that ended, as long as restarts are left.

    Args:
        team: the workers of the job; a new worker takes the place of the one that ended.
        give_order: sends a worker its order, and where to begin (``--resume``).
        left: the number of workers that may still be started.
    """

    def __init__(self, team: list[_Worker], give_order: Callable[[_Worker, str], None], left: int) -> None:
        self._team, self._give_order, self._left = team, give_order, left

    def of(self, worker: _Worker, answer: dict[str, Any]) -> _Worker | None:
        """Prints the fault of a worker and returns a new worker of the same rank; None when the job has to end."""
        if not self._left or answer["error"] not in _PASSING:
            return None
        self._left -= 1
        where = f"worker {worker.rank} on {socket.gethostname()} (process {worker.process.pid})"
        print(
            f"sparserow: {where}: {answer['message']}; a new worker takes its place ({self._left} restarts left)\n"
            + answer.get("trace", ""),
            end="",
            file=sys.stderr,
            flush=True,
        )
        worker.link.close()
        worker.process.wait(_STOP_SEC)
        fresh = _start(worker.rank)
        self._team[self._team.index(worker)] = fresh
        self._give_order(fresh, "never")  # the new worker continues with the present rows
        return fresh


def _result(said: dict[str, Any]) -> TrainResult:
    history = tuple(EpochResult(**epoch) for epoch in said["history"])
    points = tuple(EvaluationPoint(**point) for point in said["points"])
    return TrainResult(**{**said, "history": history, "points": points, "kept": tuple(said["kept"])})


@contextlib.contextmanager
def _started(workers: int) -> Any:
    team: list[_Worker] = []
    try:
        for rank in range(workers):
            team.append(_start(rank))
        yield team
    finally:
        for worker in team:
            worker.link.close()  # ends the process, whatever it does
        for worker in team:
            try:
                worker.process.wait(_STOP_SEC)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def _start(rank: int) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ},  # the workers of a machine communicate on its loopback
        )
    return _Worker(rank, process, ours)


def _listen(
    team: list[_Worker], check: Callable[[], None], *, may_lose: bool, replacements: _Replacements
) -> list[dict[str, Any]]:
    """Returns the answers of the workers, in the order of ranks.

    After a first error, it waits a short time for the answers of other workers, and returns those that came.

    Args:
        team: the workers.
        check: called every half second; an error that it raises ends the wait.
        may_lose: whether the other workers continue without a worker that was killed.
        replacements: starts new workers in place of those that ended.
    """
    answers: dict[int, dict[str, Any]] = {}
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for worker in team:
            selector.register(worker.link, selectors.EVENT_READ, worker)
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            check()
            left = _CHECK_SEC if deadline is None else min(_CHECK_SEC, max(0.0, deadline - time.monotonic()))
            for key, _ in selector.select(left):
                worker = key.data
                try:
                    part = worker.link.recv(1 << 16)
                except ConnectionResetError:
                    part = b""
                worker.heard += part
                if part and not part.endswith(b"\n"):
                    continue
                selector.unregister(worker.link)
                answer = worker.answer()
                fresh = replacements.of(worker, answer) if "error" in answer else None
                if fresh is not None:
                    selector.register(fresh.link, selectors.EVENT_READ, fresh)
                    continue
                if may_lose and worker.rank > 0 and "is_lost" in answer:
                    print(f"sparserow: {answer['message']}; the other workers continue", file=sys.stderr)
                    continue
                answers[worker.rank] = answer
                if "error" in answers[worker.rank] and deadline is None:
                    deadline = time.monotonic() + _LAST_WORDS_SEC
    return [answers[rank] for rank in sorted(answers)]


def _first_cause(errors: list[dict[str, Any]]) -> SparserowError:
    """Returns the most informative error: one of the taxonomy, rather than one that another worker's end may have
    caused.
    """
    best = min(errors, key=lambda error: (error["error"] in (Internal.number, Unavailable.number), error["error"]))
    if "trace" in best:
        print(best["trace"], file=sys.stderr)
    error = error_of(best["error"], best["message"])
    error.__cause__ = _WorkerTracebackError(best["cause"]) if "cause" in best else None
    return error


class _WorkerTracebackError(Exception):
    """The traceback that an error has in its worker, as the cause of the same error in this process."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"
