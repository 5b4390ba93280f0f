"""A process that is forked beside a store may let go of its copy, as the processes of a data loader do."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os
import numpy as np
from sparserow.cpp_ext import _server

store = _server.Store()
store.create_table(
    _server.TableSchema(
        id=1,
        name="n/t",
        dim=8,
        init=_server.InitSpec(kind="uniform", a=-1.0, b=1.0),
        optimizer=_server.OptimizerSpec(kind="adagrad", eps=1e-8),
    )
)
store.assign(1, np.arange(100_000, dtype=np.uint64), np.ones((100_000, 8), np.float32))
child = os.fork()
if child == 0:
    del store
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(int(store.pull(1, np.arange(100_000, dtype=np.uint64))[2].sum()))
"""


def test_a_forked_process_lets_go_of_a_store() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.split() == ["7", "100000"], ended.stderr
