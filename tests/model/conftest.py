"""Puts the model (schedule, invariants, protocol) on the import path of the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
