"""How a server process is asked to stop: SIGTERM and SIGINT once, in good order; a second one kills."""

from __future__ import annotations

import asyncio
import signal


class StopRequest:
    """An event that signals set. Belongs to one event loop, whose signal handlers it installs."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        asyncio.get_running_loop().remove_signal_handler(number)  # the next one has its default effect
        signal.signal(number, signal.SIG_DFL)
        self.ask(number.name)

    def ask(self, reason: str) -> None:
        """Asks the process to stop; the first reason stays."""
        self.reason = self.reason or reason
        self._event.set()

    async def wait(self) -> str:
        """Waits until someone asks; returns why."""
        await self._event.wait()
        return self.reason
