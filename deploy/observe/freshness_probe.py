"""Measures freshness from end to end: it writes marked rows in training, and looks them up until they are served."""

from __future__ import annotations

import secrets
import time

import numpy as np

from ...proto.errors import DeadlineExceeded, InvalidArgument, NotFound
from ...serving.client.client import ServingClient
from ...worker.api.session import Session

_MARK = np.uint64(0x7F5A_0000_0000_0000)  # the first marked key; marked keys are deleted in the end
_LOOK_SEC = 0.002


def probe_freshness(
    session: Session, client: ServingClient, table: str, *, count: int = 20, deadline_sec: float = 10.0
) -> list[float]:
    """Measures the seconds from a write in training to the lookup that first returns it.

    The keys are marked (from 0x7F5A000000000000 on) and random, so that they meet no row of a model. They are deleted
    afterwards.

    Args:
        session: a session of the training cluster.
        client: a client of serving processes that follow it.
        table: the name of a table that both have.
        count: the number of writes, one after another.
        deadline_sec: the longest time for a write to be served, in seconds.

    Returns:
        The ``count`` measured times in seconds, ascending.

    Raises:
        DeadlineExceeded: a write was not served in time.
        NotFound: the model has no such table.
        InvalidArgument: ``count`` or ``deadline_sec`` is not above 0.
    """
    if count < 1 or not deadline_sec > 0:
        raise InvalidArgument(f"probe_freshness: count {count}, deadline_sec {deadline_sec}; allowed: >= 1, > 0")
    if table not in client.tables():
        raise NotFound(f"table {table!r}: is not in model {client.model!r}; it has: {', '.join(client.tables())}")
    rows = session.table(table)
    keys = _MARK + np.frombuffer(secrets.token_bytes(4 * count), np.uint32).astype(np.uint64)
    seconds = []
    try:
        for number, key in enumerate(keys):
            row = np.full((1, rows.schema.dim), float(number + 1), np.float32)
            begun = time.monotonic()
            rows.assign(keys[number : number + 1], row)
            while not client.lookup(table, keys[number : number + 1]).found[0]:
                if time.monotonic() - begun > deadline_sec:
                    raise DeadlineExceeded(
                        f"table {table!r}: marked key {key} was not served within {deadline_sec:g} s"
                    )
                time.sleep(_LOOK_SEC)
            seconds.append(time.monotonic() - begun)
    finally:
        rows.delete(keys)
    return sorted(seconds)
