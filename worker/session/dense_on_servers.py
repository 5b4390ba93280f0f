"""Dense tensors whose values are on servers, as they take part in a step: their gradients go with those of rows."""

from __future__ import annotations

from typing_extensions import override

from .participant import SEALED, NoPart, Seal, Step
from .session_parts import DenseSide


class DenseOnServers(NoPart):
    """A model's dense tensors on servers.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: DenseSide) -> None:
        self._tensors = tensors

    @override
    def seal(self, step: Step) -> Seal:
        """Adds the gradients of backward to those of rows, which are sealed afterwards."""
        self._tensors.stage()
        return SEALED

    @override
    def forget(self, step: Step, *, has_failed: bool) -> None:
        """Drops the gradients, so that the next forward reads again."""
        self._tensors.end_step()
