"""Waits until a cluster serves."""

from __future__ import annotations

import time

from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, SparserowError
from ...proto.security.security import Security, loaded_security

_POLL_SEC = 0.2


def wait_until_ready(coordinator: str, deadline_sec: float, security: str | None = None) -> None:
    """Returns when the coordinator says that every shard serves; a shard whose node is gone is waited for.

    Args:
        coordinator: ``HOST:PORT``.
        deadline_sec: to wait at most.
        security: path of the file to show; None: the process's own.

    Raises:
        DeadlineExceeded: not in time; says what it waited for.
    """
    deadline = time.monotonic() + deadline_sec
    shown: Security | None = None if security is None else loaded_security(security)
    while True:
        try:
            with ControlClient(coordinator, security=shown) as control:
                control.cluster()
            return
        except SparserowError as error:  # also: which shards it waits for
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the cluster at {coordinator} was not ready within {deadline_sec:.0f} s: {error}"
                ) from None
        time.sleep(_POLL_SEC)
