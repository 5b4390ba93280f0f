"""What keeps a server alive on a node of Ray, without Ray."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

from sparserow.deploy.ray.supervisor import ServerCommand, Supervisor


def supervisor(*arguments: str) -> Supervisor:
    made = object.__new__(Supervisor)  # as on a node: there it asks Ray for the node's address
    made._command = ServerCommand("serving 0", arguments, r"ready at (?P<address>\S+:\d+)", "--port")
    made._host, made._port, made._lock, made._stopping = "10.0.0.1", 7, threading.Lock(), threading.Event()
    made._process, made._address, made._last_words, made._starts, made._node = None, "", "", 0, ""
    return made


def test_braces_of_a_path_are_the_path_s() -> None:
    line = supervisor("--host={host}", "--root=s3://models/{date}")._line()
    assert "--host=10.0.0.1" in line
    assert "--root=s3://models/{date}" in line


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, tries = supervisor(), []

    def refused(*_: Any, **__: Any) -> subprocess.Popen[str]:
        tries.append(1)
        if len(tries) == 2:
            kept._stopping.set()
        raise OSError(11, "no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    kept._keep()
    assert len(tries) == 2
    assert kept.state()["last_words"] == "BlockingIOError: [Errno 11] no more processes"
