"""A small file that several processes change one after another, on any storage that can create a file exclusively.

A process claims the right to replace the current content with a file ``NAME.HASH.N.claim``, which only one process can
create. N is 0 at first. When a claim stays because its process has ended, another process claims N+1 after a while. The
process with the lower number then changes nothing any more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable

from ..checkpoint.folder import Folder
from ..errors import NotFound, ResourceExhausted, Unavailable

CLAIM_SEC = 20.0  # age at which another process may replace a claim; a change must take less than half of it
MOST_BYTES = 1 << 20
_LONGEST_WAIT_SEC = 120.0
_LOOK_SEC = 0.05

Change = Callable[[bytes | None], bytes | None]


class SharedFile:
    """A small shared file. Thread-safe.

    Args:
        folder: the folder of the file; it need not exist.
        name: the name of the file.
        claim_sec: the age at which another process may replace a claim, in seconds.
    """

    def __init__(self, folder: Folder, name: str, claim_sec: float = CLAIM_SEC) -> None:
        self._folder = folder
        self._name = name
        self._claim_sec = claim_sec

    def read(self) -> bytes | None:
        """Returns the content of the file; None when the file does not exist.

        Raises:
            DataLoss: the file has more than 1 MiB.
        """
        try:
            return self._folder.read_small(self._name, MOST_BYTES)
        except NotFound:
            return None

    def change(self, work: Change) -> None:
        """Replaces the content of the file while no other process does.

        Args:
            work: receives the current content (None: no file) and returns the new one (None: unchanged). It may be
                called again with newer content.

        Raises:
            Unavailable: other processes kept changing the file, or the storage is too slow.
            SparserowError: ``work`` raised it; the file is unchanged.
        """
        deadline = time.monotonic() + max(_LONGEST_WAIT_SEC, 2 * self._claim_sec)
        waited_for, since = "", 0.0
        while time.monotonic() < deadline:
            before = self.read()
            claims = self._claims(before)
            if claims and claims[-1] != waited_for:
                waited_for, since = claims[-1], time.monotonic()
            if claims and time.monotonic() < since + self._claim_sec:
                time.sleep(_LOOK_SEC)
                continue
            claimed_at = time.monotonic()
            mine = self._claim_name(before, len(claims) and _number(claims[-1]) + 1)
            if not self._claim(mine):
                continue
            if self.read() == before:
                self._change_claimed(work, before, mine, claimed_at)
                return
            self._folder.delete(mine)  # the file changed between the read and the claim
        raise Unavailable(f"{self._folder.url}/{self._name}: other processes are changing it; try again")

    def _claim(self, name: str) -> bool:
        """Makes a claim; returns False when another process has made it.

        A full local disk still has room for a file without content, so that ``prune`` can make room there.
        """
        try:
            return self._folder.create(name, signature())
        except ResourceExhausted:
            if not self._folder.is_local:
                raise
            return self._folder.create(name, b"")

    def _change_claimed(self, work: Change, before: bytes | None, mine: str, claimed_at: float) -> None:
        try:
            after = work(before)
            if after is not None and after != before:
                is_late = time.monotonic() > claimed_at + self._claim_sec / 2
                if is_late or self._claims(before)[-1:] != [mine]:
                    raise Unavailable(f"{self._folder.url}/{self._name}: changing it took too long; try again")
                if len(after) > MOST_BYTES:
                    where = f"{self._folder.url}/{self._name}"
                    raise ResourceExhausted(
                        f"{where}: the new content has {len(after)} bytes; allowed: at most {MOST_BYTES}"
                    )
                self._folder.put(self._name, after)
        finally:
            for claim in self._claims(before):
                if _number(claim) <= _number(mine):
                    self._folder.delete(claim)

    def _claims(self, content: bytes | None) -> list[str]:
        """Returns the claims on replacing this content, ordered by their numbers."""
        pattern = re.compile(rf"{re.escape(self._claim_stem(content))}\.(\d+)\.claim")
        return sorted((name for name in self._folder.names() if pattern.fullmatch(name)), key=_number)

    def _claim_stem(self, content: bytes | None) -> str:
        return f"{self._name}.{'none' if content is None else hashlib.sha256(content).hexdigest()[:16]}"

    def _claim_name(self, content: bytes | None, number: int) -> str:
        return f"{self._claim_stem(content)}.{number}.claim"


def signature() -> bytes:
    """Returns the content of a claim: the process that made it, and a random token that no other claim has."""
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "token": secrets.token_hex(16)}
    return json.dumps(facts).encode() + b"\n"


def _number(claim: str) -> int:
    return int(claim.rsplit(".", 2)[1])
