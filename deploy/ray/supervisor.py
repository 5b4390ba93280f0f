"""The work of a Ray actor: it runs one ``sparserow`` server process on its node, and restarts it whenever it ends.

The process ends with the actor, however the actor ends, because the process asks the kernel for that. The thread that
started the process lives as long as the actor's process does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...proto.process.whole_file import write_whole

_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 0.5, 5.0
_CALM_SEC = 30.0  # after a run of this length, the pauses before restarts begin with the first again
_STOP_SEC = 15.0


@dataclass(frozen=True)
class ServerCommand:
    """A server to run.

    Attributes:
        name: the name of the server in messages, such as "shard 0".
        arguments: the arguments of ``sparserow``; ``{host}`` stands for the node's address, and ``{folder}`` for
            ``folder``.
        ready: a pattern of the line that says where the server listens, with the group ``address``.
        port_option: the option that sets its port, so that it keeps its address when it is restarted in the same place.
        folder: a folder of the server's own on its node, in which its port outlives the actor; it is removed in the
            end. "" means none.
    """

    name: str
    arguments: tuple[str, ...]
    ready: str
    port_option: str
    folder: str = ""


@dataclass(frozen=True)
class ServerState:
    """The state of a supervised process.

    Attributes:
        name: the name of the server.
        address: ``HOST:PORT`` where it serves; "" while it does not serve.
        pid: the id of the process; 0 when there is none now.
        starts: the number of times that this actor has started it.
        last_words: the last line of output of the process that ended last; "" when none has ended.
        node: the id of the node.
    """

    name: str
    address: str
    pid: int
    starts: int
    last_words: str
    node: str


class Supervisor:
    """The actor of one server, on the node that Ray chose; see :class:`ServerCommand`."""

    def __init__(self, command: dict[str, Any]) -> None:
        import ray

        self._command = ServerCommand(**command)
        context = ray.get_runtime_context()
        self._node, self._host = context.get_node_id(), ray.util.get_node_ip_address()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._address, self._last_words, self._starts = "", "", 0
        self._port = self._former_port()
        self._thread = threading.Thread(target=self._keep, name="sparserow-supervisor", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """Returns a :class:`ServerState` as a mapping."""
        with self._lock:
            process = self._process
            pid = process.pid if process is not None and process.poll() is None else 0
            address = self._address if pid else ""
            state = ServerState(self._command.name, address, pid, self._starts, self._last_words, self._node)
        return asdict(state)

    def stop(self) -> None:
        """Ends the process in order, and kills it when it does not end in time."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        self._thread.join(_STOP_SEC)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(_STOP_SEC)
        if self._command.folder:
            shutil.rmtree(self._command.folder, ignore_errors=True)

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_SEC
        while not self._stopping.is_set():
            began = os.times().elapsed
            try:
                words = self._run_once()
            except Exception as error:  # for example no memory for a process; the start is tried again
                words = f"{type(error).__name__}: {error}"
            with self._lock:
                self._last_words = words
            if os.times().elapsed - began > _CALM_SEC:
                pause = _FIRST_PAUSE_SEC
            self._stopping.wait(pause)
            pause = min(_LONGEST_PAUSE_SEC, 2 * pause)

    def _run_once(self) -> str:
        """Runs the process to its end, and returns its last line."""
        with self._lock:
            self._process = process = subprocess.Popen(
                self._line(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            self._address, self._starts = "", self._starts + 1
        try:
            last = self._follow(process)
        except BaseException:
            process.kill()  # nothing reads its output any more
            process.wait()
            raise
        return f"{last} (exit code {process.wait()})"

    def _follow(self, process: subprocess.Popen[str]) -> str:
        """Forwards the output of the process until its end and learns where it serves; returns the last line."""
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)  # goes to Ray's log of the actor
            last = line.strip() or last
            if match := re.search(self._command.ready, line):
                with self._lock:
                    self._address = match["address"]
                self._keep_port(int(match["address"].rpartition(":")[2]))
        return last

    def _line(self) -> list[str]:
        names = {"host": self._host, "folder": self._command.folder}
        arguments = [re.sub(r"\{(host|folder)\}", lambda m: names[m[1]], each) for each in self._command.arguments]
        module = f"{__package__.rpartition('.')[0]}.cli"
        return [
            *(sys.executable, "-m", module, *arguments),
            f"{self._command.port_option}={self._port}",
            f"--die-with-parent={os.getpid()}",
        ]

    def _former_port(self) -> int:
        if not self._command.folder:
            return 0
        Path(self._command.folder).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return int((Path(self._command.folder) / "port").read_text())
        return 0

    def _keep_port(self, port: int) -> None:
        self._port = port
        if self._command.folder:
            write_whole(Path(self._command.folder) / "port", str(port))
