"""A process that has imported what programs import, and forks them: the server of ``forked_programs``.

It runs as ``python fork_server.py IMAGE CONTROL LISTENER PADDING``. A request is one line of JSON with descriptors
beside it. On the control socket the owner asks, and a fork is the owner's own child (CLONE_PARENT): exit codes, signals
and the death of a parent are those of a program that the owner started. At the listener any process asks; such a fork
is the server's child, and the connection that asked for it gets its exit code. The server ends with its owner.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What programs import, as `sys.modules` of running ones has it.
_PLAIN = (
    *("typer", "grpc", "grpc.aio", "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "uvloop", "numpy"),
    *("pydantic", "yaml", "cryptography.x509", "cryptography.hazmat.primitives.serialization", "fsspec", "aiohttp.web"),
    *("prometheus_client", "multiprocessing", "secrets", "uuid", "tempfile", "rich.console", "importlib.metadata"),
)
_TORCH = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.run",
    "torch.export",
    "pytest",
    "pandas",
    "pyarrow.dataset",
)
_OURS_PLAIN = ("ps_server", "serving", "deploy/launch", "deploy/commands", "deploy/observe", "proto")
_OURS_TORCH = ("worker", "deploy/train")
IMAGES = ("plain", "torch")

_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE_NUMBER = {"x86_64": 56, "aarch64": 220}
_PR_GET_TID_ADDRESS = 40
_FREE_FROM = 500  # descriptors from here on are no program's own
_REQUEST_BYTES = 1 << 20


@dataclass
class Request:
    """A program to fork.

    Attributes:
        command: its command line, from the interpreter on.
        environment, folder: the environment and the working folder.
        is_leader: whether it begins a session of its own.
        starts_others: whether it has a server for programs that it starts.
        listeners: the addresses of the servers of the tests' process, by image.
        targets: the numbers that the descriptors have in the program.
        descriptors: the descriptors, as they came.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    is_leader: bool
    starts_others: bool
    listeners: dict[str, str]
    targets: list[int]
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def send(link: socket.socket, request: Request) -> None:
    """Sends a request and its descriptors."""
    told = {name: value for name, value in vars(request).items() if name != "descriptors"}
    line = json.dumps(told).encode() + b"\n"
    sent = socket.send_fds(link, [line], request.descriptors)
    link.sendall(line[sent:])


def received(link: socket.socket) -> Request | None:
    """The next request; None at the end of the connection."""
    line, descriptors, _, _ = socket.recv_fds(link, _REQUEST_BYTES, 64)
    while line and not line.endswith(b"\n"):
        more = link.recv(_REQUEST_BYTES)
        line = line + more if more else b""
    if not line:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return Request(**json.loads(line), descriptors=list(descriptors))


def fork_sibling() -> int:
    """Forks a child of this process's parent; it returns as ``os.fork`` does.

    The calls around the system call are those of ``os.fork``. The kernel writes the child's thread id where the C
    library keeps it, as it does for the library's own fork.
    """
    libc = ctypes.PyDLL(None, use_errno=True)  # it keeps the interpreter's lock, which the child has as well
    place = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_TID_ADDRESS) failed")
    number = _CLONE_NUMBER[platform.machine()]
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    last = (place, None) if platform.machine() == "x86_64" else (None, place)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(libc.syscall(ctypes.c_long(number), ctypes.c_long(flags), None, None, *last))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone failed")
    return pid


def serve(control: socket.socket, listener: socket.socket | None) -> Request:
    """Forks what is asked for; it returns in each fork, with the request. At the owner's end the process ends."""
    # A fork is found by its descriptor; the value has the connection that asked for the fork, and its id.
    waiting: dict[int, tuple[socket.socket, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        if listener is not None:
            selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj in (control, listener):
                    link = control if key.fileobj is control else listener.accept()[0]  # type: ignore[union-attr]
                    request = received(link)
                    if request is None:
                        if link is control:
                            os._exit(0)
                        link.close()
                        continue
                    pid = fork_sibling() if link is control else os.fork()
                    if pid == 0:
                        for other in (control, listener, link, *(each for each, _ in waiting.values())):
                            if other is not None:
                                other.close()
                        for descriptor in waiting:
                            os.close(descriptor)
                        return request
                    request.close()
                    with contextlib.suppress(BrokenPipeError):  # of a process that has ended; its fork runs on
                        link.sendall(b"%d\n" % pid)
                    if link is not control:
                        descriptor = os.pidfd_open(pid)
                        waiting[descriptor] = (link, pid)
                        selector.register(descriptor, selectors.EVENT_READ)
                else:
                    link, pid = waiting.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(OSError):
                        link.sendall(b"%d\n" % code)
                    link.close()


def become(request: Request) -> Callable[[], None]:
    """Makes this process what the request's would be; returns what runs the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(_keep, {**sys.modules})  # the first to be registered is the last to be called
    if request.is_leader:
        os.setsid()
    if request.starts_others:
        ours, theirs = socket.socketpair()
        server = os.fork()
        if server == 0:
            ours.close()
            request.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _name([sys.executable, "forks of", str(os.getppid())], {})
            return become(serve(theirs, None))
        theirs.close()
        _follow(request, ours, server)
    else:
        _follow(request, None, None)
    _take_descriptors(request)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # it may be another by TMPDIR
    _name(request.command, request.environment)
    words = request.command[1:]
    is_unbuffered = words[0] == "-u" or bool(request.environment.get("PYTHONUNBUFFERED"))
    words = words[words[0] == "-u" :]
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=is_unbuffered)  # type: ignore[union-attr]
    sys.orig_argv = list(request.command)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = builtins
    given = [path for path in request.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in given if path not in sys.path]
    sys.modules["numpy"].random.seed()  # as in a process that imports it: each has another state
    if words[0] == "-m":
        name = words[1]
        sys.modules.pop(name, None)
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, request.folder)
        return lambda: runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    main.__dict__["__file__"] = words[0]
    code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    return lambda: exec(code, main.__dict__)


def _keep(modules: dict[str, Any]) -> None:
    """Spares the image's modules when the interpreter ends: taking them apart copies most of their memory. What the
    program made itself, and modules that it imported, end as in a started program.
    """
    ours = {name: module for name, module in modules.items() if name.partition(".")[0] not in sys.stdlib_module_names}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ours))
    for name in ours:
        sys.modules.pop(name, None)


def _follow(request: Request, control: socket.socket | None, server: int | None) -> None:
    """Has the program fork what it starts in its turn."""
    import forked_programs

    forked_programs.install_in_fork(control, request.environment, request.listeners)
    if control is not None and server is not None:

        def end() -> None:
            control.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(server, 0)

        atexit.register(end)


def _take_descriptors(request: Request) -> None:
    """Gives the descriptors their numbers."""
    free = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE_FROM) for descriptor in request.descriptors]
    request.close()
    for descriptor, target in zip(free, request.targets, strict=True):
        os.dup2(descriptor, target, inheritable=True)
        os.close(descriptor)


def _name(command: list[str], environment: dict[str, str]) -> None:
    """Writes the command line and the environment where the kernel shows them (proc(5), proc_pid_stat(5)).

    The program's own environment must not be read from there any more.
    """
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    begin, end, environment_begin, environment_end = (int(fields[at]) for at in range(45, 49))
    variables = [f"{name}={value}" for name, value in environment.items()]
    for first, last, words in ((begin, end, command), (environment_begin, environment_end, variables)):
        text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)[: last - first - 1]
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, text, len(text))


def _import_image(image: str) -> None:
    """Imports what programs of the image import, and nothing that begins a thread."""
    root = Path(__file__).resolve().parents[2]
    names = [*_PLAIN, *(_TORCH if image == "torch" else ())]
    for folder in (*_OURS_PLAIN, *(_OURS_TORCH if image == "torch" else ())):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            names.append(".".join(("sparserow", *(parts[:-1] if parts[-1] == "__init__" else parts))))
    if image == "plain":
        sys.modules["torch"] = None  # type: ignore[assignment] # what needs it is not imported
    for name in names:
        with contextlib.suppress(ImportError):  # of parts that are optional, and of those that need torch
            importlib.import_module(name)
    if image == "plain":
        del sys.modules["torch"]
    assert image == "torch" or not [name for name in sys.modules if name.partition(".")[0] == "torch"]


def main(image: str, control: int, listener: int) -> Callable[[], None]:
    """Serves; it returns in each fork, with what runs its program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    _import_image(image)
    gc.enable()
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork has no threads, and this process has {len(threads)}"
    sys.modules["fork_server"] = sys.modules["__main__"]
    import forked_programs  # noqa: F401 -- forks find it

    sys.path.remove(str(Path(__file__).resolve().parent))
    return become(serve(socket.socket(fileno=control), socket.socket(fileno=listener)))


if __name__ == "__main__":
    run: Any = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    run()
