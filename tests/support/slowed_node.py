"""The command line ``sparserow`` in a process that really runs at about a twentieth of its speed.

A child stops this process for 95 ms of each 100 ms, by signals, from the moment at which torch is imported. It prints
``slowed PID`` first.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch  # noqa: F401 - its import shall not be slowed

_PULSES = """
import os, signal, sys, time
pid = int(sys.argv[1])
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.095)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)
except ProcessLookupError:
    pass
"""

if __name__ == "__main__":
    from sparserow.deploy import cli

    print(f"slowed {os.getpid()}", flush=True)
    subprocess.Popen([sys.executable, "-c", _PULSES, str(os.getpid())], stderr=subprocess.DEVNULL)
    cli.main(sys.argv[1:])
