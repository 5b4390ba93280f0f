"""Lets signals stop a server process: the first SIGTERM or SIGINT stops it in order, a second one kills it."""

from __future__ import annotations

import asyncio
import signal


class StopRequest:
    """An event that signals set. It belongs to one event loop, whose signal handlers it installs.

    Attributes:
        reason: why the process is to stop; empty until then.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        asyncio.get_running_loop().remove_signal_handler(number)  # the next signal has its default effect
        signal.signal(number, signal.SIG_DFL)
        self.ask(number.name)

    def ask(self, reason: str) -> None:
        """Asks the process to stop; the first reason is kept."""
        self.reason = self.reason or reason
        self._event.set()

    async def wait(self) -> str:
        """Waits until the process is asked to stop, and returns the reason."""
        await self._event.wait()
        return self.reason
