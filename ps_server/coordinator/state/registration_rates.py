"""How fast each namespace registers workers. The module does no I/O."""

from __future__ import annotations

from ....proto.security.quotas import beyond_quota

BURST_SEC = 10.0  # as many registrations as fall to this time may come at once
MOST_WAIT_SEC = 30.0
_FEW = 1024


class RegistrationRates:
    """Paces the registrations of each namespace: a burst is let in at once, and the next ones wait for their turns.

    A namespace that has its whole burst again is forgotten.
    """

    def __init__(self) -> None:
        self._whole_at: dict[str, float] = {}  # by namespace: when it has its whole burst again, in seconds
        self._forget_at = _FEW

    def __len__(self) -> int:
        return len(self._whole_at)

    def delay(self, namespace: str, per_sec: float, now: float, most_sec: float = MOST_WAIT_SEC) -> float:
        """Counts a registration, and returns the seconds that it has to wait.

        Args:
            namespace: the namespace of the worker.
            per_sec: the registrations of this namespace each second.
            now: the present time, in seconds of a monotonic clock.
            most_sec: the longest time that it waits, in seconds.

        Raises:
            ResourceExhausted: it would have to wait longer; it is not counted.
        """
        if len(self._whole_at) >= self._forget_at:
            self._whole_at = {name: at for name, at in self._whole_at.items() if at > now}
            self._forget_at = max(_FEW, 2 * len(self._whole_at))
        whole_at = max(self._whole_at.get(namespace, now), now)
        wait_sec = max(0.0, whole_at + 1 / per_sec - now - max(BURST_SEC, 1 / per_sec))
        if wait_sec > most_sec:
            raise beyond_quota(
                namespace,
                "registrations_per_sec",
                f"more than {per_sec:g} registrations of workers a second",
                f"{per_sec * BURST_SEC:.0f} at once and {per_sec:g} a second then",
                "try again later",
            )
        self._whole_at[namespace] = whole_at + 1 / per_sec
        return wait_sec
