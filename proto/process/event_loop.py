"""The event loop of a server process."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import uvloop

from .startup import end_start


def run_server(server: Coroutine[Any, Any, None]) -> None:
    """Runs a server in a loop of its own until it returns; what the process made before is spared from collection.

    Args:
        server: serves until it is asked to stop. What it raises is raised here.
    """
    end_start()
    uvloop.run(server)
