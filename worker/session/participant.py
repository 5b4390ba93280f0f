"""The contract of a step's end: what takes part in it, and in which order.

A step ends in two phases, so that all ranks and all that they hold change together or not at all:

    seal      each participant judges its gradients, or leaves numbers on a device to be judged. Nothing has changed.
    prepare   each participant makes sure that its change cannot fail. Nothing has changed.
    (vote)    the ranks agree: the step is committed, skipped or refused.
    commit    each participant changes what it holds; or abort: each drops what it was to change.
    forget    the step's gradients are gone, however the step ended.

Participants are a list in the order of their commits. The rows on servers come first, because their commit alone may
still find that the job has left this worker behind; then nothing else has changed. The dense optimizer is the last that
changes anything, because torch cannot take its step back. Seal, prepare and abort go through the list backwards: the
dense side brings gradients and the scale of the loss from a device, by which rows are sealed; and what the ranks do
together comes before what one of them can refuse alone, so that no rank waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from ...proto.errors import SparserowError
from .tracing import Trace

if TYPE_CHECKING:
    import torch

    from .loss_scale import LossScale
    from .sparse_optimizer import SparseOptimizer

NonFinitePolicy: TypeAlias = Literal["raise", "skip"]


@dataclass(slots=True)
class Step:
    """A step that ends.

    Attributes:
        number: the number of the step.
        trace: receives the spans.
        dense: the optimizer of the dense side; None: there is none here.
        scale: the enabled scaler of the loss; None: the loss is not scaled.
        sparse: the optimizer with the tables' learning rates; None: there is no table, or the step is empty.
        allow_empty: see :meth:`Session.step`.
        most_norm: the largest norm of a row's gradient; longer ones are shortened.
        is_voting: whether other ranks vote over the step.
        is_shared: whether more than the rows on servers is committed, so that these are prepared before.
        raises_nonfinite: whether NaN or Inf is an error; else the step is skipped.
        note_empty: is called when backward has brought gradients of no row; None: such a step is no mistake.
    """

    number: int
    trace: Trace
    dense: torch.optim.Optimizer | None = None
    scale: LossScale | None = None
    sparse: SparseOptimizer | None = None
    allow_empty: bool = False
    most_norm: float = math.inf
    is_voting: bool = False
    is_shared: bool = False
    raises_nonfinite: bool = True
    note_empty: Callable[[], None] | None = None

    @property
    def unscale(self) -> float:
        """What gradients are multiplied by."""
        return 1.0 if self.scale is None else self.scale.inverse


@dataclass(slots=True)
class Seal:
    """What a participant says of its gradients.

    Attributes:
        nonfinite: which gradient has NaN or Inf, as the begin of a sentence; "": none has.
        refusal: the error with which this rank refuses the step; None: it refuses nothing.
        pending: what is to be judged yet; None: nothing is.
    """

    nonfinite: str = ""
    refusal: SparserowError | None = None
    pending: Pending | None = None


@dataclass(slots=True)
class Pending:
    """Numbers on a device that decide a seal; those of all participants come to the host in one copy.

    Attributes:
        numbers: () float32 each, all on one device.
        judge: returns the seal, given the numbers.
    """

    numbers: Sequence[torch.Tensor]
    judge: Callable[[Sequence[float]], Seal]


SEALED = Seal()


class Participant(Protocol):
    """What takes part in the end of a step; the module says when each method is called."""

    def seal(self, step: Step) -> Seal:
        """Judges the gradients of the step. An error ends the step on this rank."""
        ...

    def prepare(self, step: Step) -> None:
        """Makes sure that the change cannot fail.

        Raises:
            OutsideQuorum: the step has its quorum without this worker, and goes on without it.
            SparserowError: this rank refuses the step.
        """
        ...

    def commit(self, step: Step) -> None:
        """Changes what the step changes.

        Raises:
            OutsideQuorum: as for :meth:`prepare`, of the first participant alone.
            SparserowError: whether the change was made is not known, or the text says so.
        """
        ...

    def abort(self, step: Step, *, is_skipped: bool) -> None:
        """Drops what was prepared.

        Args:
            step: the step.
            is_skipped: whether the loop goes on without this step; False: the step ends in an error.
        """
        ...

    def forget(self, step: Step, *, has_failed: bool) -> None:
        """Drops the gradients of the step, however it ended.

        Args:
            step: the step.
            has_failed: whether it ends in an error.
        """
        ...

    def stats(self) -> Mapping[str, int]:
        """Returns what this adds to the counters of :class:`SessionStats`."""
        ...


class NoPart:
    """Takes part in a step without doing anything; what does something in some phases derives from it."""

    def seal(self, step: Step) -> Seal:
        """Judges nothing."""
        del step
        return SEALED

    def prepare(self, step: Step) -> None:
        """Prepares nothing."""

    def commit(self, step: Step) -> None:
        """Changes nothing."""

    def abort(self, step: Step, *, is_skipped: bool) -> None:
        """Drops nothing."""

    def forget(self, step: Step, *, has_failed: bool) -> None:
        """Drops nothing."""

    def stats(self) -> Mapping[str, int]:
        """Counts nothing."""
        return {}
