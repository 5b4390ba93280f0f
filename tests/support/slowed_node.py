"""The command line ``sparserow`` in a process that really runs at about a twentieth of its speed.

A child stops this process for 95 ms of each 100 ms, by signals, once all modules are imported. It prints ``slowed
PID`` first.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch.distributed.run

from sparserow.deploy import cli
from sparserow.deploy.commands import doctor, node_doctor, train
from sparserow.deploy.train import checked_nodes, training_display, training_job

IMPORTED = (torch, doctor, node_doctor, train, checked_nodes, training_display, training_job)  # imports are not slowed

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
    print(f"slowed {os.getpid()}", flush=True)
    subprocess.Popen([sys.executable, "-c", _PULSES, str(os.getpid())], stderr=subprocess.DEVNULL)
    cli.main(sys.argv[1:])
