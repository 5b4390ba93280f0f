"""A small file that several processes change, one after the other, on any storage that makes a file exclusively.

A process claims the right to replace what the file holds now by a file ``NAME.HASH.N.claim``, which one process alone
can make. N is 0. Where a claim stays although its process has ended, N+1 is claimed after a while; the process of a
lower number then changes nothing any more.
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

CLAIM_SEC = 20.0  # after which a claim is given up for another one; its process has half of it
MOST_BYTES = 1 << 20
_LONGEST_WAIT_SEC = 120.0
_LOOK_SEC = 0.05

Change = Callable[[bytes | None], bytes | None]


class SharedFile:
    """One file. Thread-safe.

    Args:
        folder: where it lies; need not exist.
        name: of the file.
        claim_sec: how long a claim lasts.
    """

    def __init__(self, folder: Folder, name: str, claim_sec: float = CLAIM_SEC) -> None:
        self._folder = folder
        self._name = name
        self._claim_sec = claim_sec

    def read(self) -> bytes | None:
        """What it holds; None: it is not there.

        Raises:
            DataLoss: it has more than 1 MiB.
        """
        try:
            return self._folder.read_small(self._name, MOST_BYTES)
        except NotFound:
            return None

    def change(self, work: Change) -> None:
        """Replaces what the file holds, while no other process does.

        Args:
            work: gets what the file holds (None: it is not there) and returns what it shall hold (None: as it is). It
                may be called again with something newer.

        Raises:
            Unavailable: other processes were changing it all the time, or the storage is too slow.
            SparserowError: what ``work`` raised; nothing is changed then.
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
            if not self._folder.create(mine, signature()):
                continue
            if self.read() == before:
                self._change_claimed(work, before, mine, claimed_at)
                return
            self._folder.delete(mine)  # it was changed between the look and the claim
        raise Unavailable(f"{self._folder.url}/{self._name}: other processes are changing it; try again")

    def _change_claimed(self, work: Change, before: bytes | None, mine: str, claimed_at: float) -> None:
        try:
            after = work(before)
            if after is not None and after != before:
                is_late = time.monotonic() > claimed_at + self._claim_sec / 2
                if is_late or self._claims(before)[-1:] != [mine]:
                    raise Unavailable(f"{self._folder.url}/{self._name}: changing it took too long; try again")
                if len(after) > MOST_BYTES:
                    where = f"{self._folder.url}/{self._name}"
                    raise ResourceExhausted(f"{where}: has {len(after)} bytes; allowed: at most {MOST_BYTES}")
                self._folder.put(self._name, after)
        finally:
            for claim in self._claims(before):
                if _number(claim) <= _number(mine):
                    self._folder.delete(claim)

    def _claims(self, content: bytes | None) -> list[str]:
        """Claims of the right to replace this content, by their numbers."""
        pattern = re.compile(rf"{re.escape(self._claim_stem(content))}\.(\d+)\.claim")
        return sorted((name for name in self._folder.names() if pattern.fullmatch(name)), key=_number)

    def _claim_stem(self, content: bytes | None) -> str:
        return f"{self._name}.{'none' if content is None else hashlib.sha256(content).hexdigest()[:16]}"

    def _claim_name(self, content: bytes | None, number: int) -> str:
        return f"{self._claim_stem(content)}.{number}.claim"


def signature() -> bytes:
    """What a claim holds: the process that made it, unlike any other claim's."""
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "token": secrets.token_hex(16)}
    return json.dumps(facts).encode() + b"\n"


def _number(claim: str) -> int:
    return int(claim.rsplit(".", 2)[1])
