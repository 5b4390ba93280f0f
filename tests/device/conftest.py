"""Tests on a counted device (deploy/bench/counting_device.py), run by ``tests/e2e/test_counted_device.py``.

torch must know the device before the first backward of its process, so these tests have a process of their own:
``SPARSEROW_COUNTED_DEVICE=1 pytest -c tests/pytest.ini --rootdir tests tests/device``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

if os.environ.get("SPARSEROW_COUNTED_DEVICE"):
    from sparserow.deploy.bench.counting_device import device

    device()
else:
    collect_ignore_glob = ["test_*.py"]
