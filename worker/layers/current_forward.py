"""What the layers that a thread calls ask, during a forward, for rows made before it and for joint lookups."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .embedding import DistributedLayer
    from .joint_lookups import JointForward


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.forwards: list[tuple[object, Forward | None, JointForward | None]] = []


_of_thread = _OfThread()


class Forward(Protocol):
    """What a layer asks, during a forward, for the rows of a lookup."""

    def rows(self, layer: DistributedLayer, ids: Tensor, offsets: Tensor | None, *, has_weights: bool) -> Tensor | None:
        """Returns the rows of a lookup, or pooled rows; None when the layer is to look them up itself."""


def rows_made_ahead(
    layer: DistributedLayer, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
) -> Tensor | None:
    """Returns the rows that were made for a lookup before this thread's forward; None when there are none.

    Args:
        layer: the layer that is called.
        ids, offsets, weights: the arguments of the call.
    """
    forwards = _of_thread.forwards
    forward = forwards[-1][1] if forwards else None
    return None if forward is None else forward.rows(layer, ids, offsets, has_weights=weights is not None)


def joint_forward() -> JointForward | None:
    """Returns what the layers of this thread's forward ask for joint lookups; None: they make them themselves."""
    forwards = _of_thread.forwards
    return forwards[-1][2] if forwards else None


def begin_forward(owner: object, forward: Forward | None, joint: JointForward | None = None) -> None:
    """Has the layers that this thread calls ask a forward for their rows, until :func:`end_forward`.

    Args:
        owner: the module whose forward begins; what an interrupted forward of it has left is forgotten.
        forward: what the layers ask; None: they look all rows up themselves.
        joint: what layers ask whose lookups ranks make together; None: they make them themselves.
    """
    _of_thread.forwards = [each for each in _of_thread.forwards if each[0] is not owner]
    _of_thread.forwards.append((owner, forward, joint))


def end_forward(owner: object) -> JointForward | None:
    """Ends what :func:`begin_forward` began for ``owner``, where it is the newest of this thread.

    Returns:
        What its layers asked for joint lookups; None: nothing.
    """
    forwards = _of_thread.forwards
    return forwards.pop()[2] if forwards and forwards[-1][0] is owner else None
