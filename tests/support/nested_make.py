"""What a test that runs make needs to know of the make that may run the tests."""

from __future__ import annotations

import os


def outside_make() -> dict[str, str]:
    """The environment without what ``make test-py`` hands down, by which another make says more or does otherwise."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "OFFLINE"}
