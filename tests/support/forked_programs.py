"""Programs that tests start, as forks of a process that has imported what they import: an import of torch takes three
seconds of CPU, and that of a server most of one.

``install`` puts a class in the place of ``subprocess.Popen``: commands of ours and scripts of tests are forked from one
of two images, without torch and with it (``fork_server``). Every other command is started, and so are the first case of
each command, what runs ``as_started``, and everything with SPARSEROW_TEST_FULL. Programs that are forked fork what they
start in their turn. Forks share one seed of ``hash()``, which programs that are started draw.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fork_server import IMAGES, Request, send
from long_form import FULL

TESTS = Path(__file__).resolve().parents[1]
_WRITTEN = Path(tempfile.gettempdir()).resolve()  # where tests write scripts
_COMMANDS = "sparserow.deploy.cli"
# Modules that are forked, and their image; of the commands those that import torch, some of them at times, are below.
_MODULES = {_COMMANDS: "plain", "sparserow.deploy.train.worker_process": "torch", "torch.distributed.run": "torch"}
_TORCH_COMMANDS = {"bench", "demo", "predict", "publish", "table", "train"}
_START_OTHERS = {"up", "train", "bench", "demo", "torch.distributed.run"}
# Variables that are read once, by the interpreter, the loader or a library that an image has imported.
_READ_ONCE = re.compile(
    r"PYTHON(?!UNBUFFERED|PATH|BREAKPOINT)|LD_|TORCH(?!ELASTIC|_NCCL|INDUCTOR_CACHE_DIR)|OMP_|MKL_|OPENBLAS|GRPC_"
    r"|MALLOC_|CUDA_|TRITON|LANG|LC_"
)
# An import of pyarrow begins a thread of its allocator otherwise.
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Room for the command line of a fork, and for its environment.
_COMMAND_BYTES, _ENVIRONMENT_BYTES = 4096, 32768
_DEADLINE_SEC = 120.0

_Popen: Any = subprocess.Popen


class _Server:
    """A fork server of this process.

    Args:
        control: the socket of its owner.
        environment: what it was started with.
    """

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        self.control, self._environment = control, environment

    def differing(self, environment: Mapping[str, str]) -> list[str]:
        """Variables of a program by which it is started, and not forked."""
        theirs, ours = _read_once(environment), _read_once(self._environment)
        return sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))


class _Forking:
    """What this process knows of fork servers."""

    def __init__(self) -> None:
        self.is_on = False
        self.servers: dict[str, _Server] = {}
        self.processes: list[subprocess.Popen[bytes]] = []  # of the servers that this process started
        self.listeners: dict[str, str] = {}
        self.lock = threading.Lock()  # a request and its answer are one turn on a server's socket
        self.started_once: set[str] | None = set()  # None: the first case of a command is forked too


_forking = _Forking()


def install() -> None:
    """Has this process fork programs of ours; its own fork servers start with the first of them."""
    _forking.is_on = not FULL
    subprocess.Popen = Popen  # type: ignore[misc]


def install_in_fork(control: socket.socket | None, environment: Mapping[str, str], listeners: dict[str, str]) -> None:
    """As ``install``, in a program that was forked."""
    _forking.is_on, _forking.started_once, _forking.listeners = True, None, listeners
    if control is not None:
        image = "torch" if "torch" in sys.modules else "plain"
        _forking.servers = {image: _Server(control, environment)}
    subprocess.Popen = Popen  # type: ignore[misc]
    asyncio.create_subprocess_exec = _create_subprocess_exec  # type: ignore[assignment]


def end() -> None:
    """Ends this process's fork servers."""
    for server in _forking.servers.values():
        server.control.close()
    for process in _forking.processes:
        process.wait(_DEADLINE_SEC)
    _forking.servers.clear()
    _forking.processes.clear()


@contextlib.contextmanager
def as_started() -> Iterator[None]:
    """Starts every program of the block, as a user does."""
    before, _forking.is_on = _forking.is_on, False
    try:
        yield
    finally:
        _forking.is_on = before


def will_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the command is forked."""
    return _forking.is_on and _image_of(command) is not None and _allows(environment)


def _image_of(command: Sequence[str]) -> tuple[str, str] | None:
    """The image of a command that can be forked, and its name."""
    if not command or command[0] != sys.executable:
        return None
    words = [*command[1:]]
    words = words[words[:1] == ["-u"] :]
    if words[:1] == ["-m"] and len(words) > 1 and words[1] in _MODULES:
        if words[1] != _COMMANDS:
            return _MODULES[words[1]], words[1]
        name = next(
            (word for at, word in enumerate(words[2:], 2) if word[:1] != "-" and words[at - 1] != "--security"), ""
        )
        return ("torch" if name in _TORCH_COMMANDS else "plain"), name
    if words and words[0].endswith(".py") and {TESTS, _WRITTEN} & {*Path(words[0]).resolve().parents}:
        return "torch", Path(words[0]).name
    return None


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _READ_ONCE.match(name)}


def _allows(environment: Mapping[str, str]) -> bool:
    """Whether PYTHONPATH names folders of tests alone, without a module that could be in the image already."""
    for path in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        folder = Path(path).resolve()
        if TESTS in (folder, *folder.parents):
            continue
        names = {each.name.partition(".")[0] for each in folder.glob("*")} if folder.is_dir() else set()
        if _WRITTEN not in folder.parents or any(map(_is_installed, names)):
            return False
    return True


def _is_installed(name: str) -> bool:
    try:
        return name.isidentifier() and importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec
        return True


def _own_servers() -> None:
    """Starts this process's servers, all at once."""
    import sparserow.proto  # noqa: F401 -- it sets variables that gRPC reads once

    folder = Path(tempfile.mkdtemp(prefix="sparserow-forks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for image in IMAGES:
        ours, theirs = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / image))
        listener.listen(64)
        numbers = (theirs.fileno(), listener.fileno())
        script = Path(__file__).with_name("fork_server.py")
        command = [sys.executable, str(script), image, *map(str, numbers), "x" * _COMMAND_BYTES]
        environment = dict(os.environ)
        process = _Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=numbers,
            env={**environment, **_NO_THREAD, "SPARSEROW_TEST_PADDING": "x" * _ENVIRONMENT_BYTES},
        )
        theirs.close()
        listener.close()
        _forking.processes.append(process)
        _forking.servers[image] = _Server(ours, environment)
        _forking.listeners[image] = str(folder / image)


class Popen(_Popen):  # type: ignore[misc]
    """``subprocess.Popen`` that forks what can be forked."""

    _link: socket.socket | None = None  # to the server whose child the program is, where it is not this process's

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, *pipes = rest[:12]
        _, gid, gids, uid, umask, is_leader, *group = rest[12:]
        command = [] if isinstance(args, (str, bytes, os.PathLike)) else [os.fspath(word) for word in args]
        environment = dict(os.environ if env is None else env)
        found = _image_of(command) if _forking.is_on and all(isinstance(word, str) for word in command) else None
        is_plain = executable in (None, command[0] if command else None) and preexec_fn is None and not shell
        is_plain &= (gid, gids, uid, umask, *group) in ((None, None, None, -1), (None, None, None, -1, -1))
        if found is None or not is_plain or not _allows(environment) or self._is_first(found[1]):
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)
            return
        with _forking.lock:
            if not _forking.servers and not _forking.listeners:
                _own_servers()
        image, name = found
        server = _forking.servers.get(image)
        differing = [] if server is None else server.differing(environment)
        if differing:  # said, because a library may have set them for all tests that follow
            warnings.warn(f"{name} is started and not forked, by other values of {differing}", stacklevel=4)
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)
            return
        given, _, _, taken, _, errors = pipes
        targets = [0, 1, 2, *pass_fds]
        descriptors = [
            0 if given == -1 else given,
            1 if taken == -1 else taken,
            2 if errors == -1 else errors,
            *pass_fds,
        ]
        request = Request(
            [*command],
            environment,
            os.getcwd() if cwd is None else os.fspath(cwd),
            bool(is_leader),
            name in _START_OTHERS,
            _forking.listeners,
            targets,
            descriptors,
        )
        link = server.control if server is not None else socket.socket(socket.AF_UNIX)
        if server is None:
            link.connect(_forking.listeners[image])
            self._link = link
        with _forking.lock:
            send(link, request)
            self.pid = int(_line(link))
        self._child_created = True
        self._close_pipe_fds(*pipes)

    @staticmethod
    def _is_first(name: str) -> bool:
        """Whether it is the first program of this name, which is started."""
        if _forking.started_once is None or name in _forking.started_once:
            return False
        _forking.started_once.add(name)
        return True

    def _internal_poll(self, *rest: Any, **named: Any) -> Any:
        if self._link is None:
            return super()._internal_poll(*rest, **named)
        return self._ended(0)

    def _wait(self, timeout: float | None) -> Any:
        if self._link is None:
            return super()._wait(timeout)
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        """The exit code that the server told, within ``timeout`` seconds."""
        assert self._link is not None
        if self.returncode is None and select.select([self._link], [], [], timeout)[0]:
            self.returncode = int(_line(self._link))
            self._link.close()
        return self.returncode


def _line(link: socket.socket) -> str:
    link.settimeout(_DEADLINE_SEC)
    line = b""
    while not line.endswith(b"\n"):
        part = link.recv(1)
        assert part, "a fork server ended; its message is on stderr"
        line += part
    return line.decode()


class _AsyncProcess:
    """What ``asyncio.create_subprocess_exec`` returns, of a program that was forked."""

    def __init__(self, popen: Popen) -> None:
        self._popen, self.pid = popen, popen.pid
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        descriptor = os.pidfd_open(popen.pid)

        def ended() -> None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
            self._end.set_result(popen.wait())

        asyncio.get_running_loop().add_reader(descriptor, ended)

    @property
    def returncode(self) -> int | None:
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, number: int) -> None:
        if self._end.done():
            raise ProcessLookupError
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()


_started_exec = asyncio.create_subprocess_exec


async def _create_subprocess_exec(*command: str, **options: Any) -> Any:
    known = {"stdin", "start_new_session"}
    if options.keys() <= known and will_fork(command, os.environ):
        return _AsyncProcess(Popen(command, **options))
    return await _started_exec(*command, **options)
