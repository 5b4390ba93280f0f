"""The units of docs/operations.md, run as systemd runs them: ExecStart, Restart, RestartSec and the start limit."""

from __future__ import annotations

import configparser
import re
import shlex
import signal
import threading
import time
from collections import deque
from pathlib import Path

from sparserow_process import Launcher, Process

DOCS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
_PROGRAM = "/opt/sparserow/bin/sparserow"
_LOOK_SEC = 0.02
# What systemd takes where a unit says nothing.
_DEFAULTS = {"Restart": "no", "RestartSec": "100ms", "StartLimitIntervalSec": "10s", "StartLimitBurst": "5"}
_UNITS_OF_TIME = {"ms": 0.001, "s": 1.0, "": 1.0, "min": 60.0}


def unit_blocks() -> dict[str, configparser.ConfigParser]:
    """The unit files of the page by their names; the first line of each block names its file."""
    blocks = re.findall(r"```ini\n# /etc/systemd/system/(\S+)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    units = {}
    for name, text in blocks:
        units[name] = configparser.ConfigParser(interpolation=None)
        units[name].optionxform = str  # type: ignore[assignment,method-assign]
        units[name].read_string(text)
    return units


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(ms|s|min|)", text)
    assert match, text
    return int(match[1]) * _UNITS_OF_TIME[match[2]]


class Service:
    """One unit under a supervisor of its own thread.

    Args:
        name: of its file; ``@`` takes ``instance`` in.
        replaced: texts of ExecStart that stand for another machine's, and what they are here.
    """

    def __init__(self, launcher: Launcher, name: str, replaced: dict[str, str], instance: str = "") -> None:
        unit = unit_blocks()[name]
        options = {**_DEFAULTS, **dict(unit["Unit"]), **dict(unit["Service"])}
        words = shlex.split(options["ExecStart"].replace("%i", instance))
        assert words[0] == _PROGRAM
        for word, here in replaced.items():
            assert any(word in each for each in words), f"{name}: ExecStart does not say {word}"
            words = [each.replace(word, here) for each in words]
        self._launcher, self._words = launcher, words[1:]
        self._restarts = options["Restart"]
        assert self._restarts in ("no", "always")
        self._pause_sec = _seconds(options["RestartSec"])
        self._limit_sec, self._burst = _seconds(options["StartLimitIntervalSec"]), int(options["StartLimitBurst"])
        self._stopping = threading.Event()
        self.has_failed = False  # the start limit was hit: systemd starts it no more
        self.runs: list[Process] = []
        self._start()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    @property
    def process(self) -> Process:
        """Its newest process."""
        return self.runs[-1]

    def stop(self) -> None:
        """Ends the unit."""
        self._stopping.set()
        self._thread.join(60)
        self.process.signal(signal.SIGTERM)

    def _start(self) -> None:
        self.runs.append(self._launcher.start(*self._words))

    def _supervise(self) -> None:
        starts = deque([time.monotonic()], maxlen=self._burst)
        while not self._stopping.wait(_LOOK_SEC):
            if self.process.popen.poll() is None:
                continue
            if self._restarts == "no" or self._stopping.wait(self._pause_sec):
                return
            is_limited = self._limit_sec > 0 and len(starts) == self._burst
            if is_limited and time.monotonic() - starts[0] < self._limit_sec:
                self.has_failed = True
                return
            starts.append(time.monotonic())
            self._start()
