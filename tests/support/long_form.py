"""Whether this run is the long form, which ``make test-full`` is: SPARSEROW_TEST_FULL=1.

Cases that only it has carry the marker ``full``; tests whose number of rounds or kills differs read ``FULL``.
"""

from __future__ import annotations

import os

FULL = os.environ.get("SPARSEROW_TEST_FULL") == "1"
