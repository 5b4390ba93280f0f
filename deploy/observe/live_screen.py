"""The loop of ``sparserow top``: it reads the status of a cluster periodically, and reacts to keys."""

from __future__ import annotations

import contextlib
import select
import signal
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...proto import control_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, NotFound, Unavailable
from ...proto.status.cluster_status import view_of
from .cluster_screen import screen
from .scrolled_screen import KeyReader, ScrolledScreen
from .two_readings import look, of_namespace


def watch(
    client: ControlClient, console: Console, keys: TextIO, *, every_sec: float, once: bool, namespace: str | None = None
) -> None:
    """Shows the cluster until q or Ctrl-C; the terminal is restored afterwards.

    Args:
        client: the client of the coordinator.
        console: the console to draw on.
        keys: the input for keys; it is not read unless it is a terminal.
        every_sec: the time between two readings, in seconds.
        once: whether one screen is shown after two readings.
        namespace: the namespace whose tables, jobs and faults are shown; None shows all.

    Raises:
        SparserowError: the first reading failed. Later failures are shown, and the reading is repeated.
    """
    if once:
        reply, view = look(client, every_sec, namespace=namespace)
        console.print(screen(client.address, reply, view))
        return
    before, taken = _look(client, namespace), time.monotonic()
    shown = screen(client.address, before, view_of(None, before, 0.0))
    scrolled = ScrolledScreen(shown)
    with (
        _ctrl_c() as ctrl_c,
        contextlib.suppress(KeyboardInterrupt),
        _single_keys(keys) as can_read,
        Live(scrolled, console=console, screen=True, auto_refresh=False) as live,
    ):
        live.refresh()
        reader, deadline = _Keys(keys) if can_read else None, _after(every_sec)
        while True:
            try:
                with ctrl_c.ends_it():
                    key = _next_key(reader, deadline)
                    if key == "quit":
                        return
                    reply = None if key else _look(client, namespace)
            except (Unavailable, DeadlineExceeded, NotFound) as error:
                scrolled.shown, deadline = (
                    Group(Text(f"{error}; the coordinator is asked again", "red"), shown),
                    _after(every_sec),
                )
                live.refresh()
                continue
            if reply is None:
                if key and scrolled.move(key):
                    live.refresh()
                continue
            now = time.monotonic()
            shown = screen(client.address, reply, view_of(before, reply, now - taken))
            before, taken, deadline = reply, now, _after(every_sec)
            scrolled.shown = shown
            live.refresh()


class _CtrlC:
    """A handler of Ctrl-C that interrupts only a wait, because a half-drawn screen could not be restored."""

    def __init__(self) -> None:
        self._came = self._waits = False

    def __call__(self, *_: Any) -> None:
        self._came = True
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def ends_it(self) -> Iterator[None]:
        """Lets Ctrl-C raise KeyboardInterrupt within the block, also when it came before the block."""
        self._waits = True
        try:
            if self._came:
                raise KeyboardInterrupt
            yield
        finally:
            self._waits = False


@contextlib.contextmanager
def _ctrl_c() -> Iterator[_CtrlC]:
    handler = _CtrlC()
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGINT, before)


def _look(client: ControlClient, namespace: str | None) -> pb.GetStatusReply:
    return of_namespace(client.status(), namespace)


def _after(seconds: float) -> float:
    return time.monotonic() + seconds


@contextlib.contextmanager
def _single_keys(keys: TextIO) -> Iterator[bool]:
    """Reads keys as they are pressed, without echo, during the block; yields False where there is no terminal."""
    if not keys.isatty():
        yield False
        return
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield True
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


class _Keys:
    """The keys of a terminal, one after another."""

    def __init__(self, keys: TextIO) -> None:
        self.descriptor = keys.fileno()
        self._reader = KeyReader(self.descriptor)
        self._waiting: list[str] = []

    def next(self, wait_sec: float) -> str | None:
        """Returns the next key; None when none came within ``wait_sec``."""
        if not self._waiting and select.select([self.descriptor], [], [], max(0.0, wait_sec))[0]:
            self._waiting = self._reader.read()
        return self._waiting.pop(0) if self._waiting else None


def _next_key(keys: _Keys | None, deadline: float) -> str | None:
    """Returns a key that was pressed before the deadline; None at the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left)
        elif key := keys.next(left):
            return key
    return None
