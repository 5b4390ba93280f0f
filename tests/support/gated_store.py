"""A folder of checkpoints behind HTTP, whose files can be held back: a load then stands still where a test wants it."""

from __future__ import annotations

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_DEADLINE_SEC = 300.0


class GatedStore:
    """Serves a folder for the duration of a block.

    Args:
        folder: what is served.

    Attributes:
        url: of the folder.
        paths: of the files that were asked for, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.paths: list[str] = []
        self._lock = threading.Lock()
        self._pattern: re.Pattern[str] | None = None
        self._free = 0
        self._is_open = threading.Event()
        self._is_met = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self, directory=str(folder)))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> GatedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, pattern: str, *, after: int = 0) -> None:
        """Holds back every file whose path has this pattern, but the first ``after`` that are asked for."""
        with self._lock:
            self._is_open.clear()
            self._is_met.clear()
            self._pattern, self._free = re.compile(pattern), after

    def until_met(self) -> None:
        """Returns when a file that is held back was asked for."""
        assert self._is_met.wait(_DEADLINE_SEC), "no file that is held back was asked for"

    def release(self) -> None:
        """Gives all files that were held back."""
        with self._lock:
            self._pattern = None
        self._is_open.set()

    def pass_by(self, path: str) -> None:
        """Blocks as long as a file is held back."""
        with self._lock:
            self.paths.append(path)
            if self._pattern is None or not self._pattern.search(path):
                return
            self._free -= 1
            if self._free >= 0:
                return
        self._is_met.set()
        self._is_open.wait(_DEADLINE_SEC)


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, store: GatedStore, *arguments: Any, **named: Any) -> None:
        self._store = store
        super().__init__(*arguments, **named)

    def do_GET(self) -> None:
        self._store.pass_by(self.path)
        try:
            super().do_GET()
        except OSError:  # the process that asked has ended
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass
