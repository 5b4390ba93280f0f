"""Real ``sparserow`` processes for tests: every wait has a deadline, and none is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

DEADLINE_SEC = 120.0  # for a machine that has much else to do
MARK = "SPARSEROW_TEST_MARK"
_LAST_WORDS = 4000  # characters of each process in the report of a test that failed
# What a coordinator says where other tests have the CPUs.
_HELD_UP = re.compile(
    r"\S+ warning coordinator: the coordinator did not run for [\d.]+ s; all leases are extended by that time"
)
_PORTS = random.SystemRandom()  # tests run in several processes, which must not draw the same


def wait_until(holds: Callable[[], object], what: str, deadline_sec: float = DEADLINE_SEC) -> None:
    """Waits until ``holds()`` is true; fails with ``what`` at the deadline."""
    deadline = time.monotonic() + deadline_sec
    while not holds():
        assert time.monotonic() < deadline, f"waited {deadline_sec:g} s in vain: {what}"
        time.sleep(0.02)


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that waits for its parent to take its exit code has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Holds processes for the block: it begins when every thread of them stands still."""
    try:
        stop(*pids)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def stop(*pids: int) -> None:
    """Sends SIGSTOP and waits until every thread stands still.

    The kernel hands the signal to one thread, which stops the others once it has a CPU; until then they answer.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_stands_still(pid) for pid in pids), "processes that stand still")


def _stands_still(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rsplit(")", 1)[1].split()[0] in "TZ" for stat in stats)
    return False


def free_port() -> int:
    """A port that nobody listens on now, and that the kernel gives to nobody: not to a connection, nor to a port 0."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert lowest >= 4096, "too few ports below those that the kernel gives"
    while True:
        port = _PORTS.randrange(lowest // 2, lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def free_ports(count: int) -> list[int]:
    """As many different ports as :func:`free_port` gives."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def run_ranks(script: str, world: int, *arguments: object, deadline_sec: float = 600, interprets: bool = True) -> None:
    """Runs ``python SCRIPT RANK ARGUMENTS...`` for each rank at once; fails unless all end well in time.

    Args:
        script: a test's own file; it may import what tests may.
        interprets: whether kernels run under Triton's interpreter where there is no GPU, which is slow.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    if not interprets:
        environment.pop("TRITON_INTERPRET", None)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *map(str, arguments)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        messages = [rank.communicate(timeout=deadline_sec)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, messages


class Process:
    """One running command line, which signals reach; its output is kept in files."""

    def __init__(
        self, command: Sequence[str], name: str, folder: Path, environment: dict[str, str], stdin: int
    ) -> None:
        self.name = name
        stem = folder / f"{uuid.uuid4().hex[:8]}-{name}"
        self._out_path, self._err_path = stem.with_suffix(".out"), stem.with_suffix(".err")
        with self._out_path.open("wb") as out, self._err_path.open("wb") as err:
            self.popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=environment,
            )

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out_path.read_text()

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err_path.read_text()

    @property
    def complaints(self) -> list[str]:
        """Lines of standard error, but for the coordinator's that it had no CPU for a while."""
        return [line for line in self.err.splitlines() if not _HELD_UP.fullmatch(line)]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of ``pattern`` in the output; fails when the process ends without it."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.out) or re.search(pattern, self.err)

        wait_until(lambda: found() or self.popen.poll() is not None, f"{pattern!r} of {self.popen.args!r}")
        match = found()
        assert match, f"ended with {self.popen.returncode}: {self.out!r} {self.err!r}"
        return match

    def end(self) -> int:
        """Waits for the end; the exit code."""
        return self.popen.wait(DEADLINE_SEC)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; after SIGSTOP it waits until every thread stands still."""
        if number == signal.SIGSTOP:
            stop(self.popen.pid)
        else:
            self.popen.send_signal(number)

    def error_line(self) -> str:
        """Waits for the end with exit code 1 and one line of complaint, and returns that line."""
        code = self.end()
        assert code == 1, f"exit code {code}: {self.out!r} {self.err!r}"
        lines = self.complaints
        assert len(lines) == 1, self.err
        assert lines[0].startswith("sparserow: ")
        return lines[0]


class Launcher:
    """Starts processes that carry a mark of their own in the environment, as do all their descendants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self.mark}
        self._started: list[Process] = []

    def with_support_modules(self) -> Launcher:
        """Has its processes find the modules of ``tests/support``, as those in the folder of a user; returns itself."""
        path = str(Path(__file__).parent)
        self.environment["PYTHONPATH"] = os.pathsep.join([path, self.environment.get("PYTHONPATH", "")])
        return self

    def start(
        self, *arguments: str, within: Sequence[str] = (), stdin: int = subprocess.DEVNULL, keeps: bool = False
    ) -> Process:
        """Starts ``sparserow ARGUMENTS``; ``within`` stands before the command line.

        A job leaves its model nowhere, which saves its export, unless ``keeps`` leaves that to the job.
        """
        if arguments[:1] == ("train",) and len(arguments) > 1 and not keeps:
            arguments = (*arguments, "--set", "publish.local=null")
        name = next((word for word in arguments if not word.startswith("-")), "sparserow")
        return self._start([*within, sys.executable, "-m", "sparserow.deploy.cli", *arguments], name, stdin)

    def start_torchrun(
        self, *options: str, arguments: Sequence[str], script: str | None = None, within: Sequence[str] = ()
    ) -> Process:
        """Starts an agent of torchrun whose workers run ``sparserow ARGUMENTS``, or a script of this folder instead."""
        program = ["-m", "sparserow.deploy.cli"] if script is None else [str(Path(__file__).with_name(script))]
        module = ["-m", "torch.distributed.run", *options, *program, *arguments]
        return self._start([*within, sys.executable, *module], "torchrun")

    def start_script(self, name: str, *arguments: str, within: Sequence[str] = ()) -> Process:
        """Starts a script of this folder."""
        script = Path(__file__).with_name(name)
        return self._start([*within, sys.executable, str(script), *arguments], script.stem)

    def _start(self, command: Sequence[str], name: str, stdin: int = subprocess.DEVNULL) -> Process:
        self._started.append(Process(command, name, self._folder, self.environment, stdin))
        return self._started[-1]

    def living(self) -> list[psutil.Process]:
        """Processes that carry the mark and have not ended, this one excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == self.mark and runs(process):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def by_role(self) -> dict[str, list[psutil.Process]]:
        """Living processes of a job and its cluster: worker, shard, cluster (the coordinator)."""
        patterns = {"worker": r"worker_process", "shard": r"cli ps\b", "cluster": r"cli up\b"}
        found: dict[str, list[psutil.Process]] = {role: [] for role in patterns}
        for process in self.living():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                for role, pattern in patterns.items():
                    if re.search(pattern, words):
                        found[role].append(process)
        return found

    def last_words(self) -> list[tuple[str, str]]:
        """What each process that was started here has written last on standard error, with a heading."""
        ends = [(process, process.err[-_LAST_WORDS:]) for process in self._started]
        return [(f"standard error of {it.name} (process {it.popen.pid})", words) for it, words in ends if words]

    def kill_all(self) -> None:
        """Kills what lives, and reaps what was started here."""
        left = self.living()
        for process in left:
            process.kill()
        wait_until(lambda: not any(map(runs, left)), "the end of killed processes")
        for started in self._started:
            started.end()
