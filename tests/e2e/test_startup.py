"""Garbage collection of our processes: rare while they start, and never of what they made then."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import sparserow
from sparserow_process import free_port

COMMANDS = Path(sparserow.__file__).parent / "deploy" / "commands"

# A server of ours that prints how many objects it spares and looks at, when it is asked.
ASKED_SERVER = """
import gc, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print(gc.get_freeze_count(), *gc.get_threshold(), file=sys.stderr, flush=True))
from sparserow.deploy.cli import main
main(sys.argv[1:])
"""
IN_TURN = """
import gc
from sparserow.proto.process.startup import begin_start, end_start
before = gc.get_threshold()
end_start()
assert gc.get_freeze_count() == 0, "a user's own process is left alone"
begin_start()
begin_start()
assert gc.get_threshold()[0] == 50_000
end_start()
assert gc.get_threshold() == before
assert gc.get_freeze_count() > 1000
"""


def test_a_start_ends_with_the_former_thresholds_and_spares_what_was_made() -> None:
    subprocess.run([sys.executable, "-c", IN_TURN], check=True, timeout=60)


def test_a_coordinator_spares_the_objects_of_its_imports() -> None:
    port = free_port()
    command = [sys.executable, "-c", ASKED_SERVER, "coordinator", "--shards", "1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        deadline = threading.Timer(60, server.kill)  # ends the lines that are waited for
        deadline.start()
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            assert "waiting for 1 shards" in server.stdout.readline()
            server.send_signal(signal.SIGUSR1)
            answers = (re.fullmatch(r"(\d+) (\d+) \d+ \d+", line.strip()) for line in server.stderr)
            told = next(answer for answer in answers if answer is not None)
        finally:
            deadline.cancel()
            server.kill()
    spared, threshold = int(told[1]), int(told[2])
    assert spared > 20_000, "the modules of a server have tens of thousands of objects"
    assert threshold < 50_000


def test_commands_that_serve_end_their_start() -> None:
    commands = {path.name: path.read_text() for path in COMMANDS.glob("*.py")}
    assert [name for name, text in commands.items() if "uvloop" in text] == []
    serving = {name for name, text in commands.items() if "run_server(" in text}
    assert serving == {"coordinator.py", "gateway.py", "ps.py", "serve.py", "up.py"}
