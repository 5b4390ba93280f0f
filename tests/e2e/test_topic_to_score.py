"""The example from a topic to a served score runs to its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")


def test_what_events_say_is_served(tmp_path) -> None:
    words = [sys.executable, "-m", "sparserow.deploy.examples.topic_to_score"]
    run = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "item 50 is served with" in run.stdout
