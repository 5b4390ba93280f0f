"""Scrolls a screen of ``sparserow top`` that is longer than the terminal, and reads the keys for it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

KEYS = "q: quit; up and down (k, j), page up and page down (b, space), home and end (g, G): scroll"
_ESCAPE = b"\x1b"
_MOVES = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"k"), "up"),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"j"), "down"),
    **dict.fromkeys((b"\x1b[5~", b"b"), "page up"),
    **dict.fromkeys((b"\x1b[6~", b" "), "page down"),
    **dict.fromkeys((b"\x1b[H", b"\x1b[1~", b"\x1bOH", b"\x1b[7~", b"g"), "home"),
    **dict.fromkeys((b"\x1b[F", b"\x1b[4~", b"\x1bOF", b"\x1b[8~", b"G"), "end"),
    **dict.fromkeys((b"q", b"Q"), "quit"),
}
_LONGEST = max(map(len, _MOVES))
_READ_BYTES = 1024


class KeyReader:
    """Turns the bytes that a terminal sends into names of keys; unknown keys are ignored.

    Args:
        descriptor: the file descriptor of the terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[str]:
        """Returns the keys that were pressed, in order; ``quit`` when the terminal has ended."""
        read = os.read(self._descriptor, _READ_BYTES)
        if not read:
            return ["quit"]
        data, found = self._rest + read, []
        self._rest = b""
        while data:
            known = next((data[:size] for size in range(_LONGEST, 0, -1) if data[:size] in _MOVES), None)
            if known is not None:
                found.append(_MOVES[known])
                data = data[len(known) :]
            elif data != _ESCAPE and any(key.startswith(data) for key in _MOVES):
                self._rest = data  # the rest of a key's bytes is still to come
                break
            else:
                data = _without_first_key(data)
        return found


def _without_first_key(data: bytes) -> bytes:
    """Returns the bytes behind an unknown key; a sequence of ``ESC [`` ends with a byte from @ to ~."""
    if not data.startswith(b"\x1b["):
        return data[1:]
    end = next((at for at, byte in enumerate(data[2:], 2) if 0x40 <= byte <= 0x7E), len(data) - 1)
    return data[end + 1 :]


@dataclass
class ScrolledScreen:
    """The lines of a screen from ``first`` on, with a line below that explains the keys.

    Attributes:
        shown: the screen.
        first: the index of the line at the top; a value that is too large is corrected when the screen is drawn.
    """

    shown: RenderableType
    first: int = 0
    _room: int = 1  # number of terminal lines for the screen
    _lines: int = 0  # number of lines of the screen

    def move(self, key: str) -> bool:
        """Moves the screen by a key; returns whether it moved."""
        page = max(1, self._room - 1)
        steps = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -self._lines, "end": self._lines}
        first = self._within(self.first + steps.get(key, 0))
        is_moved, self.first = first != self.first, first
        return is_moved

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines that there is room for."""
        height = options.height or options.size.height
        lines = console.render_lines(self.shown, options.update(height=None), pad=False)
        self._room, self._lines = max(1, height - 1), len(lines)
        self.first = self._within(self.first)
        part = lines[self.first : self.first + self._room]
        for line in part:
            yield from line
            yield Segment.line()
        for _ in range(self._room - len(part)):
            yield Segment.line()
        last = self.first + len(part)
        where = "" if self._lines <= self._room else f"lines {self.first + 1} to {last} of {self._lines}; "
        yield Text(f"{where}{KEYS}", "dim", no_wrap=True, overflow="ellipsis", end="")

    def _within(self, first: int) -> int:
        return max(0, min(first, self._lines - self._room))
