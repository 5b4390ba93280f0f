"""Prints what a program finds around it as a line of JSON: ``test_forked_programs`` compares a fork with a started one.

Arguments: exit CODE | raise | interrupt | wait | draw, of random numbers | start, programs of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def facts() -> dict[str, object]:
    """What does not depend on when the program runs."""
    names = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    open_ones = [number for number in names if Path(f"/proc/self/fd/{number}").exists()]  # not the listing's own
    command = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return {
        "arguments": sys.argv,
        "original": sys.orig_argv,
        "command": [word.decode() for word in command],
        "name": __name__,
        "file": __file__,
        "main": sys.modules["__main__"].__dict__["facts"] is facts,
        "folder": os.getcwd(),
        "path": sys.path[:2],
        "environment": {name: os.environ[name] for name in sorted(os.environ) if not name.startswith("PYTEST_")},
        "shown": sorted(
            word.decode()
            for word in Path("/proc/self/environ").read_bytes().split(b"\0")
            if word and not word.startswith((b"PYTEST_", b"SPARSEROW_TEST_PADDING"))
        ),
        "descriptors": open_ones,
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "streams": [(each.line_buffering, each.write_through, each.encoding) for each in (sys.stdout, sys.stderr)],
        "read": sys.stdin.read(),
        "collector": [*__import__("gc").get_threshold()],
        "hash of a number": hash(7),
    }


def _started() -> dict[str, object]:
    """How programs end that this one starts."""
    command = [sys.executable, "-m", "sparserow.deploy.cli"]
    refused = subprocess.run(
        [*command, "status", "--coordinator=127.0.0.1:1"], capture_output=True, text=True, timeout=60
    )
    with subprocess.Popen([*command, "up", "--port=0"], stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        line, early = up.stdout.readline(), up.poll()
        try:
            up.wait(0.1)
        except subprocess.TimeoutExpired as error:
            late = type(error).__name__
        up.kill()
        return {"refused": [refused.returncode, refused.stderr], "up": [line[:17], early, late, up.wait(60), up.poll()]}


def main() -> None:
    match sys.argv[1:]:
        case ["draw"]:
            import numpy as np

            print(json.dumps([random.random(), np.random.random(), os.urandom(4).hex()]))
            return
        case ["start"]:
            print(json.dumps(_started()))
            return
    print(json.dumps(facts()), flush=True)
    match sys.argv[1:]:
        case ["exit", code]:
            sys.exit(int(code))
        case ["raise"]:
            raise ValueError("of the program")
        case ["interrupt"]:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        case ["wait"]:
            time.sleep(600)


if __name__ == "__main__":
    main()
