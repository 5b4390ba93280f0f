"""Nodes of a check as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def run_nodes(count: int, work: Callable[[int], Any]) -> dict[int, Any]:
    """Returns what ``work(index)`` returns or raises on each node; all nodes run at once."""
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
