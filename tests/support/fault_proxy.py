"""A proxy between a client and a shard that knows frames and mistreats them: cuts, copies, swallows, holds back."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from collections import Counter
from dataclasses import dataclass

HEADER_BYTES = 64
PULL, PREPARE, COMMIT, ABORT, ACK, ASSIGN, DELETE = 3, 5, 6, 7, 8, 10, 11
# How long a frame that is to be overtaken waits for another one.
_OVERTAKE_SEC = 0.02


@dataclass(frozen=True)
class Faults:
    """Chances in [0, 1], drawn per frame of the client (of ``kinds``) or reply of the shard.

    Args:
        cut_before: close both sides instead of passing a frame on.
        cut_inside: pass half of a frame on, then close both sides.
        cut_after: pass a frame on, then close both sides before its reply can pass.
        duplicate: pass a frame on twice; its second reply is swallowed.
        late_copy: pass a frame on, and once more after the next one; the second reply is swallowed.
        delay: hold a frame, and all behind it, for ``delay_sec``.
        reorder: let the next frame overtake; one that nothing overtakes goes on alone.
        swallow_reply: close both sides instead of passing a reply on (a lost acknowledgement).
        garble_reply: pass an ACK on with a type that there is not.
        delay_sec: seconds.
        kinds: types of frames that are mistreated.
    """

    cut_before: float = 0.0
    cut_inside: float = 0.0
    cut_after: float = 0.0
    duplicate: float = 0.0
    late_copy: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    swallow_reply: float = 0.0
    garble_reply: float = 0.0
    delay_sec: float = 0.02
    kinds: frozenset[int] = frozenset({COMMIT})


# Every fault of a bad network, on all frames that train.
FIVE_PERCENT = Faults(
    cut_before=0.05,
    cut_inside=0.05,
    cut_after=0.05,
    duplicate=0.05,
    late_copy=0.05,
    delay=0.05,
    reorder=0.05,
    swallow_reply=0.05,
    kinds=frozenset({PULL, PREPARE, COMMIT, ABORT}),
)

CHANCES = tuple(name for name, value in vars(Faults()).items() if name not in ("delay_sec", "kinds"))


class FaultProxy:
    """Listens on ``port`` of loopback, in a thread of its own, until ``stop``."""

    def __init__(self, target_port: int, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.counts = dict.fromkeys(CHANCES, 0)
        self.replies: Counter[int] = Counter()  # passed on to the client, by type
        self._target_port = target_port
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._ready.wait(60):
            raise TimeoutError("the proxy did not start")

    def stop(self) -> None:
        """Closes every connection and ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))

    def _draw(self, fault: str) -> bool:
        if self._random.random() >= getattr(self.faults, fault):
            return False
        self.counts[fault] += 1
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            shard_reader, shard_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        swallowed: set[int] = set()  # request ids whose next reply is the answer to a duplicate
        pumps = (
            asyncio.ensure_future(self._to_shard(reader, shard_writer, swallowed)),
            asyncio.ensure_future(self._to_client(shard_reader, writer, swallowed)),
        )
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()
            shard_writer.close()

    @staticmethod
    async def _frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes] | None:
        try:
            header = await reader.readexactly(HEADER_BYTES)
            body_bytes, kind = struct.unpack_from("<IH", header)
            (request_id,) = struct.unpack_from("<Q", header, 8)
            return kind, request_id, header + await reader.readexactly(body_bytes)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _to_shard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallowed: set[int]) -> None:
        behind: list[bytes] = []  # goes after the next frame
        reading = asyncio.ensure_future(self._frame(reader))
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=_OVERTAKE_SEC if behind else None)
                frame = reading.result() if done else None
                if done and frame is None:
                    return
                if frame is not None:
                    reading = asyncio.ensure_future(self._frame(reader))
                    overtaken, behind = behind, []
                    if not await self._pass(frame, writer, swallowed, behind):
                        return
                else:
                    overtaken, behind = behind, []
                for data in overtaken:
                    writer.write(data)
                await writer.drain()
        finally:
            reading.cancel()

    async def _pass(
        self, frame: tuple[int, int, bytes], writer: asyncio.StreamWriter, swallowed: set[int], behind: list[bytes]
    ) -> bool:
        """Passes one frame on, or what is left of it; False when the connection must end."""
        kind, request_id, data = frame
        if kind not in self.faults.kinds:
            writer.write(data)
            return True
        if self._draw("cut_before"):
            return False
        if self._draw("cut_inside"):
            writer.write(data[: len(data) // 2])
            await writer.drain()
            return False
        if self._draw("delay"):
            await asyncio.sleep(self.faults.delay_sec)
        if self._draw("reorder"):
            behind.append(data)
            return True
        writer.write(data)
        if self._draw("duplicate"):
            swallowed.add(request_id)
            writer.write(data)
        if self._draw("late_copy"):
            swallowed.add(request_id)
            behind.append(data)
        if self._draw("cut_after"):
            await writer.drain()
            return False
        return True

    async def _to_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallowed: set[int]) -> None:
        seen: set[int] = set()
        while (frame := await self._frame(reader)) is not None:
            kind, request_id, data = frame
            if request_id in swallowed and request_id in seen:
                continue
            seen.add(request_id)
            if request_id and self._draw("swallow_reply"):
                return
            if kind == ACK and self._draw("garble_reply"):
                data = data[:4] + struct.pack("<H", 0x7FFF) + data[6:]
            writer.write(data)
            await writer.drain()
            self.replies[kind] += 1
