"""Waits until a cluster serves."""

from __future__ import annotations

import time

from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, SparserowError
from ...proto.security.security import Security, loaded_security

_POLL_SEC = 0.2


def wait_until_ready(coordinator: str, deadline_sec: float, security: str | None = None) -> None:
    """Returns when the coordinator reports that every shard serves.

    Args:
        coordinator: ``HOST:PORT`` of the coordinator.
        deadline_sec: the longest wait, in seconds.
        security: the path of the security file to use; None uses that of the process.

    Raises:
        DeadlineExceeded: the cluster was not ready in time; the text says what was missing.
    """
    deadline = time.monotonic() + deadline_sec
    shown: Security | None = None if security is None else loaded_security(security)
    while True:
        try:
            with ControlClient(coordinator, security=shown) as control:
                control.cluster()
            return
        except SparserowError as error:  # its text also has the shards that are missing
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the cluster at {coordinator} was not ready within {deadline_sec:.0f} s: {error}"
                ) from None
        time.sleep(_POLL_SEC)
