"""A tensor group, as it takes part in a step: its ranks have the same gradients of rows, or all refuse it."""

from __future__ import annotations

from typing_extensions import override

from .participant import NoPart, Seal, Step
from .tensor_group import TensorGroup


class GroupVote(NoPart):
    """The ranks that get rows from the one that looks them up.

    Args:
        group: the group.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    @override
    def seal(self, step: Step) -> Seal:
        """Compares the gradients of the ranks; each of them calls it."""
        return Seal(refusal=self._group.disagreement())

    @override
    def forget(self, step: Step, *, has_failed: bool) -> None:
        """Forgets the noted gradients."""
        self._group.forget()
