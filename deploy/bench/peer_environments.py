"""Python environments of peers: each is made on first use, with the versions of ``peers/pins.py``.

An environment is complete once its stamp is written, which has the pins that it was made from. One without a stamp, or
with the stamp of other pins, is removed and made anew. A lock beside it keeps two runs from making the same one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ...proto.errors import InvalidArgument
from .peer_processes import PeerError, isolated, run_to_end, timed
from .peers.pins import PinnedEnvironment

_ASK_SEC, _VENV_SEC, _INSTALL_SEC, _LOCK_SEC = 30.0, 300.0, 2400.0, 3600.0
_STAMP = "complete.json"
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter.

    Attributes:
        path: its program.
        version: its version, such as ``3.10``.
    """

    path: str
    version: str


def default_folder() -> Path:
    """Returns the folder of the environments where none is given: in the user's cache folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    cache = (
        Path(given) if given.startswith("/") else Path.home() / ".cache"
    )  # as XDG has it: a relative path is invalid
    return cache / "sparserow" / "peers"


def interpreters(paths: Sequence[str]) -> list[Interpreter]:
    """Returns the interpreters to choose from: the running one, and those of ``--python``.

    Args:
        paths: the values of ``--python``: paths, or names of programs.

    Raises:
        InvalidArgument: a program of ``--python`` does not name a version of Python 3.
    """
    found = [Interpreter(sys.executable, f"{sys.version_info[0]}.{sys.version_info[1]}")]
    for path in paths:
        program = shutil.which(path)
        if program is None:
            raise InvalidArgument(f"--python {path}: is no program; give the path of a Python interpreter")
        try:
            asked = [program, "-c", _VERSION]
            version = subprocess.run(
                asked, capture_output=True, text=True, timeout=_ASK_SEC, check=True, stdin=subprocess.DEVNULL
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            version = ""
        if not version.startswith("3."):
            raise InvalidArgument(
                f"--python {path}: does not name its version; give the path of a Python 3 interpreter"
            )
        found.append(Interpreter(program, version))
    return found


def fitting(pins: PinnedEnvironment, known: Sequence[Interpreter]) -> Interpreter:
    """Returns the interpreter for an environment.

    Raises:
        PeerError: none has a version for which its packages exist.
    """
    for version in pins.pythons:
        for each in known:
            if each.version == version:
                return each
    have = ", ".join(sorted({each.version for each in known}))
    raise PeerError(f"needs Python {' or '.join(pins.pythons)}, and there is {have}; give --python PATH")


def python_of(pins: PinnedEnvironment, folder: Path, known: Sequence[Interpreter]) -> str:
    """Returns the interpreter of an environment, which is made unless it is complete.

    Args:
        pins: the packages of the environment.
        folder: the folder of all environments, which exists.
        known: the interpreters to choose from.

    Raises:
        PeerError: there is no fitting interpreter, a step fails or runs past its deadline, or another run makes the
            environment for an hour.
    """
    base = fitting(pins, known)
    place = folder / f"{pins.name}-{base.version}"
    stamp = json.dumps({"python": base.version, **asdict(pins)}, indent=2) + "\n"
    python = place / "bin" / "python"
    with _locked(folder / f"{place.name}.lock", place.name):
        if not _is_complete(place, stamp):
            if place.exists():
                shutil.rmtree(place)
            log = folder / f"{place.name}.log"
            log.unlink(missing_ok=True)
            with timed(f"{pins.name}: making an environment of Python {base.version}"):
                command = [base.path, "-m", "venv", str(place)]
                run_to_end(command, log=log, deadline_sec=_VENV_SEC, environment=isolated())
            for arguments in pins.installs:
                with timed(f"{pins.name}: installing {' '.join(each for each in arguments if each[0] != '-')}"):
                    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
                    run_to_end([*command, *arguments], log=log, deadline_sec=_INSTALL_SEC, environment=isolated())
            (place / _STAMP).write_text(stamp)
    return str(python)


def _is_complete(place: Path, stamp: str) -> bool:
    with suppress(OSError):
        return (place / _STAMP).read_text() == stamp
    return False


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Holds the lock of a file for the block; the kernel releases that of a process that has ended."""
    deadline = time.monotonic() + _LOCK_SEC
    is_shown = False
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PeerError(f"another run has made {name} for {_LOCK_SEC / 60:.0f} minutes") from None
            if not is_shown:
                print(f"{name}: another run makes this environment; waiting for it", file=sys.stderr, flush=True)
                is_shown = True
            time.sleep(0.1)
        yield
