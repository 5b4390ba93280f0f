"""What ``sparserow top`` does: looks at a cluster again and again, and listens for a key."""

from __future__ import annotations

import contextlib
import select
import signal
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ...proto import control_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, Unavailable
from .cluster_screen import screen
from .cluster_view import look, view_of


def watch(client: ControlClient, console: Console, keys: TextIO, *, every_sec: float, once: bool) -> None:
    """Shows the cluster until q or Ctrl-C; the terminal is left as it was found.

    Args:
        client: of the coordinator.
        console: where to.
        keys: where q may come from; one that is no terminal is not read.
        every_sec: between looks.
        once: one screen, after two looks.

    Raises:
        SparserowError: the first look fails; later ones that do are shown and tried again.
    """
    if once:
        reply, view = look(client, every_sec)
        console.print(screen(client.address, reply, view))
        return
    before, taken = client.status(), time.monotonic()
    shown: RenderableType = screen(client.address, before, view_of(None, before, 0.0))
    with (
        _ctrl_c() as ctrl_c,
        contextlib.suppress(KeyboardInterrupt),
        _single_keys(keys) as can_read,
        Live(shown, console=console, screen=True, auto_refresh=False) as live,
    ):
        live.refresh()
        while True:
            try:
                with ctrl_c.ends_it():
                    if _is_quit(keys, can_read, every_sec):
                        return
                    reply = client.status()
            except (Unavailable, DeadlineExceeded) as error:
                live.update(Group(Text(f"{error}; it is asked again", "red"), shown), refresh=True)
                continue
            now = time.monotonic()
            shown = _screen(client.address, before, reply, now - taken)
            before, taken = reply, now
            live.update(shown, refresh=True)


class _CtrlC:
    """Ctrl-C ends a wait, never what draws: a screen that is left half drawn is not given back."""

    def __init__(self) -> None:
        self._came = self._waits = False

    def __call__(self, *_: Any) -> None:
        self._came = True
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def ends_it(self) -> Iterator[None]:
        """Raises KeyboardInterrupt within the block; at its begin, when Ctrl-C came before."""
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


def _screen(address: str, before: pb.GetStatusReply, reply: pb.GetStatusReply, seconds: float) -> RenderableType:
    return Group(screen(address, reply, view_of(before, reply, seconds)), Text("q: quit", "dim"))


@contextlib.contextmanager
def _single_keys(keys: TextIO) -> Iterator[bool]:
    """Keys come as they are pressed, without echo; False where there is no terminal to read."""
    if not keys.isatty():
        yield False
        return
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield True
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _is_quit(keys: TextIO, can_read: bool, wait_sec: float) -> bool:
    """Waits; true when q was pressed meanwhile, or whoever presses keys is gone."""
    deadline = time.monotonic() + wait_sec
    while (left := deadline - time.monotonic()) > 0:
        if not can_read:
            time.sleep(left)
            return False
        if select.select([keys], [], [], left)[0] and keys.read(1) in ("q", "Q", ""):
            return True
    return False
