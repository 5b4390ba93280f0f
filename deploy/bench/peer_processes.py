"""Child processes of ``bench peers``: each has a deadline and a log, and ends with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "peers" / "worker.py"
_LAST_CHARACTERS = 160
_END_SEC = 5.0


class PeerError(Exception):
    """A peer cannot be measured.

    Attributes:
        reason: why.
        log: the file with the output of its process; None: there was none.
    """

    def __init__(self, reason: str, log: Path | None = None) -> None:
        super().__init__(reason if log is None else f"{reason}; its output is in {log}")
        self.reason, self.log = reason, log


def run_to_end(
    command: Sequence[str], *, log: Path, deadline_sec: float, environment: Mapping[str, str] | None = None
) -> str:
    """Runs a command in a process group of its own, and ends the group when the command has ended or is interrupted.

    Args:
        command: the program and its arguments.
        log: the file to which stderr is added, and stdout as well when the command fails.
        deadline_sec: the seconds after which the command is killed.
        environment: its variables; None: those of this process.

    Returns:
        What the command wrote to stdout.

    Raises:
        PeerError: the command does not start, ends with another status than 0, or runs past its deadline.
    """
    with log.open("ab") as errors:
        errors.write(f"$ {' '.join(command)}\n".encode())
        errors.flush()
        began = log.stat().st_size
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise PeerError(f"{Path(command[0]).name} does not start: {error.strerror}", log) from error
        with _ended_as_a_group(child):
            try:
                out, _ = child.communicate(timeout=deadline_sec)
            except subprocess.TimeoutExpired:
                raise PeerError(f"did not end within {deadline_sec:g} s", log) from None
    if child.returncode != 0:
        with log.open("ab") as errors:
            errors.write(out.encode())
        raise PeerError(_reason(log, began, child.returncode), log)
    return out


@contextmanager
def _ended_as_a_group(child: subprocess.Popen[str]) -> Iterator[None]:
    """Kills what is left of the child's process group after the block."""
    try:
        yield
    finally:
        if child.poll() is None:  # the child ends its own servers where it can
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_SEC)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _reason(log: Path, began: int, status: int) -> str:
    """Returns how a process ended, and its last line; of pip, its first line with an error."""
    with log.open("rb") as file:
        file.seek(began)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("ERROR: ")][::-1] or lines
    ended = f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
    return f"{ended}: {causes[-1][:_LAST_CHARACTERS]}" if causes else ended


def isolated() -> dict[str, str]:
    """Returns the variables of this process without those by which a Python finds packages of somewhere else."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "PYTHONNOUSERSITE": "1"}


def measured_by_worker(
    python: str,
    script: Path,
    asked: Mapping[str, Any],
    *,
    log: Path,
    deadline_sec: float,
    is_isolated: bool = False,
) -> dict[str, Any]:
    """Runs ``peers/worker.py`` with a peer's script, and returns what it measured.

    Args:
        python: the interpreter of the peer's environment.
        script: the file that measures the peer.
        asked: the sizes and the works, see ``peers/worker.py``.
        log: the file for the output of the peer.
        deadline_sec: the seconds that it may take.
        is_isolated: whether it finds packages of its environment alone, see :func:`isolated`.

    Returns:
        ``seconds``: the seconds of each repetition by work; ``versions``: the version of each package of the peer.

    Raises:
        PeerError: the process fails, runs past its deadline, or writes something else.
    """
    command = [python, str(WORKER), str(script), json.dumps({**asked, "parent": os.getpid()})]
    variables = {**(isolated() if is_isolated else os.environ), "CUDA_VISIBLE_DEVICES": ""}  # all peers are on the host
    out = run_to_end(command, log=log, deadline_sec=deadline_sec, environment=variables)
    with log.open("a") as file:
        file.write(out)
    try:
        found = json.loads(out.splitlines()[-1])
        seconds = {str(work): [float(each) for each in values] for work, values in found["seconds"].items()}
        versions = {str(name): str(value) for name, value in found["versions"].items()}
    except (IndexError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PeerError(f"wrote no figures: {error!r}", log) from error
    lacking = [work for work in asked["works"] if not seconds.get(work)]
    if lacking:
        raise PeerError(f"wrote no figures of {', '.join(lacking)}", log)
    return {"seconds": seconds, "versions": versions}


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Prints on stderr what is going on, and after the block how many seconds it took."""
    began = time.monotonic()
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
    print(f"{what}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
