"""A file that a command writes for another program may be a pipe to it."""

from __future__ import annotations

import subprocess
import sys


def test_a_terminal_or_pipe_is_written_as_it_is():
    code = "from pathlib import Path; from sparserow.proto.process.whole_file import write_whole; "
    code += "write_whole(Path('/dev/stdout'), 'to the pipe')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == (
        "to the pipe"
    )
