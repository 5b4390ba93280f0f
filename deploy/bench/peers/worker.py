"""Runs the script of a peer in the peer's environment: ``python worker.py SCRIPT JSON`` writes one line of JSON.

This file and the scripts import nothing of this project. A script has ``measure(asked, tools)``, which returns nothing,
and may have further functions with the same arguments, which ``Tools.start`` runs in other processes. ``asked`` has:

- ``works``: the works to measure, such as ``pull 64``: a kind and the number of columns;
- ``rows``, ``keys``: the rows of a table, and the unique random keys of a batch;
- ``repetitions``, ``warm_up``: how often each work is timed, after so many that do not count;
- ``threads``: the threads that the peer may use;
- ``cpus``: the CPUs that the process may use; empty: all;
- ``role``: the function to run; absent: ``measure``;
- ``parent``: the id of the process that started this one, with which it ends.

What a peer writes to stdout goes to stderr, so that stdout has the line of JSON alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import IO, Any

import numpy as np

_PR_SET_PDEATHSIG = 1
_START_SEC = 120.0
_BATCHES = 30
_FAILED = "failed: "  # what a process that was started writes in place of its line


class Tools:
    """What scripts of peers share: batches, the clock, further processes, and figures.

    Attributes:
        seconds: the seconds of each repetition, by work.
        versions: the version of each package of the peer.
    """

    def __init__(self, script: str, asked: dict[str, Any], output: IO[str]) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.versions: dict[str, str] = {}
        self._script, self._asked, self._output = script, asked, output
        self._children: list[subprocess.Popen[str]] = []

    def batches(self) -> Iterator[Any]:
        """Returns an endless iterator over batches (keys,) int64 of unique random keys, drawn before the clock runs."""
        random = np.random.default_rng(7)
        rows, keys = self._asked["rows"], self._asked["keys"]
        return cycle([random.choice(rows, keys, replace=False).astype(np.int64) for _ in range(_BATCHES)])

    def grads(self, dim: int) -> Any:
        """Returns gradients (keys, dim) float32."""
        return np.random.default_rng(8).normal(size=(self._asked["keys"], dim)).astype(np.float32)

    def dims(self) -> list[int]:
        """Returns the numbers of columns of the works."""
        return sorted({int(work.split()[1]) for work in self._asked["works"]}, reverse=True)

    def has(self, kind: str, dim: int) -> bool:
        """Returns whether a work is asked for."""
        return f"{kind} {dim}" in self._asked["works"]

    def time(
        self, kind: str, dim: int, make_input: Callable[[], Any], run: Callable[[Any], object], *, batches: int = 1
    ) -> None:
        """Times ``run`` on a new result of ``make_input`` each time, if that work is asked for.

        Args:
            kind: the kind of the work.
            dim: the number of columns.
            make_input: makes the input; it is not timed.
            run: the work that is timed.
            batches: the number of batches in an input; the seconds are those of one.
        """
        if not self.has(kind, dim):
            return
        seconds = []
        for repetition in range(self._asked["warm_up"] + self._asked["repetitions"]):
            prepared = make_input()
            begin = time.perf_counter()
            run(prepared)
            elapsed = time.perf_counter() - begin
            if repetition >= self._asked["warm_up"]:
                seconds.append(elapsed / batches)
        self.seconds[f"{kind} {dim}"] = seconds

    def note_versions(self, *packages: str) -> None:
        """Notes the versions of installed packages."""
        self.versions.update({package: version(package) for package in packages})

    def start(self, role: str, wait_sec: float = _START_SEC, **more: Any) -> str:
        """Runs a function of the script in another process, and returns the line that it writes with ``ready``.

        The process ends with this one, however this one ends.

        Args:
            role: the function.
            wait_sec: the seconds to wait for the line.
            more: what its ``asked`` has beside this process's.

        Raises:
            TimeoutError: the line does not come in time.
            RuntimeError: the process failed before; the text has its error.
        """
        asked = json.dumps({**self._asked, **more, "role": role, "parent": os.getpid()})
        child = subprocess.Popen(
            [sys.executable, __file__, self._script, asked], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self._children.append(child)
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(wait_sec):
                raise TimeoutError(f"{role}: the process was not ready within {wait_sec:.0f} s")
        line = child.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{role}: the process ended with status {child.wait()}")
        if line.startswith(_FAILED):
            raise RuntimeError(f"{role}: {line.removeprefix(_FAILED)}")
        return line

    def ready(self, line: object) -> None:
        """Lets the process that started this one go on."""
        self._output.write(f"{line}\n")
        self._output.flush()

    def stop(self) -> None:
        """Kills the processes that were started."""
        for child in self._children:
            child.kill()
            child.wait()
        self._children.clear()


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _loaded(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Runs a function of the script; after ``measure`` it writes the line of figures."""
    script, asked = sys.argv[1], json.loads(sys.argv[2])
    _die_with_parent(asked["parent"])
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if asked["cpus"]:
        os.sched_setaffinity(0, asked["cpus"])
    here = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # names of scripts are no packages
    tools = Tools(script, asked, output)
    role = asked.get("role", "measure")
    try:
        getattr(_loaded(script), role)(asked, tools)
        if role == "measure":
            tools.ready(json.dumps({"seconds": tools.seconds, "versions": tools.versions}))
        status = 0
    except Exception as error:
        traceback.print_exc()
        if role != "measure":
            tools.ready(_FAILED + " ".join(f"{type(error).__name__}: {error}".split()))
        status = 1
    finally:
        tools.stop()
    sys.stderr.flush()
    os._exit(status)  # threads of a peer may have no end, and its library may fail at exit


if __name__ == "__main__":
    main()
