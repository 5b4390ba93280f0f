"""Rows that were made before a forward, and their way to the layers that the forward calls.

Results do not depend on them: a layer that is called with other arguments, or in another state, looks its rows up by
itself. Under hooks of saved tensors, such as those of activation checkpointing, a part of the forward may be computed
again in the backward. So a layer looks its rows up by itself there, both times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .plan import Arguments, has_hooks
from .planned_layer import PlannedLayer
from .record import ForwardRecord

INFERENCE = -1  # the version of an inference tensor, whose changes torch does not count
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


def places_of(layers: Sequence[PlannedLayer]) -> dict[PlannedLayer, list[int]]:
    """Returns the places of each layer in a sequence of lookups."""
    places: dict[PlannedLayer, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(layer, []).append(place)
    return places


class MadeRows:
    """The rows of a forward's lookups, each handed out once.

    Args:
        places: the lookups of each layer.
        ids: the ids of each lookup.
        others: the offsets and the weights of each lookup; None: no lookup has any.
        rows: what was made of each lookup, and maybe more behind it.
        step_of: returns the number of the session's step; rows of an earlier step are not handed out.
        modes: whether the layer of each lookup was in train mode; None: each was.

    Attributes:
        size: the number of lookups.
        is_missed: whether a layer found nothing that was made for its call.
    """

    def __init__(
        self,
        places: Mapping[PlannedLayer, Sequence[int]],
        ids: Sequence[Tensor],
        others: Sequence[tuple[Tensor | None, Tensor | None]] | None,
        rows: Sequence[Any],
        step_of: Callable[[], int],
        modes: Sequence[bool] | None = None,
    ) -> None:
        self._step_of, self._step = step_of, step_of()
        self._is_grad_enabled = _is_grad_enabled()
        self._places, self._ids, self._others, self._modes = places, ids, others, modes
        self.rows: list[Any | None] = list(rows)
        self.size, self.is_missed = len(ids), False
        self._versions = [INFERENCE if each.is_inference() else each._version for each in ids]
        self._other_versions = [(version_of(offsets), version_of(weights)) for offsets, weights in others or ()]

    def take(
        self,
        layer: PlannedLayer,
        ids: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        of_ids: Callable[[Any], Any] | None = None,
    ) -> Any | None:
        """Returns what was made for a lookup; None when nothing was made for it, or its state differs.

        Args:
            layer: the layer that is called.
            ids, offsets, weights: the arguments of the call.
            of_ids: what is handed out, of what was made, where offsets or weights differ and the ids do not; None:
                nothing.
        """
        places = self._places.get(layer)
        if places is not None and self._is_grad_enabled is _is_grad_enabled() and self._step_of() == self._step:
            training, modes = layer.training, self._modes
            for place in places:
                rows = self.rows[place]
                if (
                    rows is not None
                    and training is (modes is None or modes[place])
                    and holds(ids, self._ids[place], self._versions[place])
                ):
                    is_whole = self._has_others(place, offsets, weights)
                    if is_whole or of_ids is not None:
                        self.rows[place] = None
                        return rows if is_whole or of_ids is None else of_ids(rows)
        self.is_missed = True
        return None

    def _has_others(self, place: int, offsets: Tensor | None, weights: Tensor | None) -> bool:
        if self._others is None:
            return offsets is None and weights is None
        pairs = zip((offsets, weights), self._others[place], self._other_versions[place], strict=True)
        return all(
            made is None if given is None else made is not None and holds(given, made, version)
            for given, made, version in pairs
        )

    @property
    def is_exact(self) -> bool:
        """Whether what was made of each lookup was handed out, and no other lookup asked."""
        return not self.is_missed and all(each is None for each in self.rows[: self.size])


class _Forward:
    """What the layers that a forward calls use.

    Args:
        owner: the module whose forward it is.
        record: notes the lookups; None: the forward is not traced.
        own: rows that this rank made; None: each layer looks up its own.
        joint: what ranks made together; None: layers make their joint lookups themselves.
    """

    __slots__ = ("joint", "own", "owner", "record")

    def __init__(
        self, owner: object, record: ForwardRecord | None, own: MadeRows | None, joint: MadeRows | None
    ) -> None:
        self.owner, self.record, self.own, self.joint = owner, record, own, joint


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.forwards: list[_Forward] = []


_of_thread = _OfThread()


def take_own(
    layer: PlannedLayer, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None
) -> Tensor | None:
    """Returns the rows that this rank made for a lookup before this thread's forward; None when there are none.

    Args:
        layer: the layer that is called.
        ids, offsets, weights: the arguments of the call.
    """
    forwards = _of_thread.forwards
    if not forwards:
        return None
    forward = forwards[-1]
    if forward.record is not None and not layer.is_joint:
        forward.record.note(layer, (ids, offsets, weights))
    made = forward.own
    if made is None or has_hooks() or (weights is not None and weights.requires_grad):
        return None
    rows: Tensor | None = made.take(layer, ids, offsets, weights)
    return rows


def take_joint(layer: PlannedLayer, arguments: Arguments, of_ids: Callable[[Any], Any] | None = None) -> Any | None:
    """Returns what ranks made together for a lookup before this thread's forward; None when there is nothing.

    The arguments are those of :meth:`MadeRows.take`.
    """
    forwards = _of_thread.forwards
    if not forwards or has_hooks():
        return None
    forward = forwards[-1]
    if forward.record is not None:
        forward.record.note(layer, arguments)
    return None if forward.joint is None else forward.joint.take(layer, *arguments, of_ids)


def begin_forward(
    owner: object, record: ForwardRecord | None, own: MadeRows | None, joint: MadeRows | None = None
) -> None:
    """Has the layers that this thread calls take rows of a forward, until :func:`end_forward`.

    Args:
        owner: the module whose forward begins; what an interrupted forward of it has left is forgotten.
        record: notes the lookups; None: the forward is not traced.
        own: rows that this rank made; None: each layer looks up its own.
        joint: what ranks made together; None: layers make their joint lookups themselves.
    """
    forwards = [each for each in _of_thread.forwards if each.owner is not owner]
    forwards.append(_Forward(owner, record, own, joint))
    _of_thread.forwards = forwards


def end_forward(owner: object) -> MadeRows | None:
    """Ends what :func:`begin_forward` began for ``owner``, where it is the newest of this thread.

    Returns:
        What ranks made together; None: nothing.
    """
    forwards = _of_thread.forwards
    return forwards.pop().joint if forwards and forwards[-1].owner is owner else None


def version_of(tensor: Tensor | None) -> int:
    """Returns how often a tensor was changed in place; INFERENCE for one whose changes torch does not count."""
    return INFERENCE if tensor is None or tensor.is_inference() else tensor._version


def holds(given: Tensor, made: Tensor, version: int) -> bool:
    """Whether a tensor has the values that another one had when the rows were made.

    Values on a device are not compared, since that would wait for it; there only the same memory counts.
    """
    if given.dtype is not made.dtype or (version != INFERENCE and made._version != version):
        return False
    is_here = given.is_cpu and made.is_cpu
    if not is_here and given.device != made.device:
        return False
    return given.is_set_to(made) or (is_here and given.shape == made.shape and torch.equal(given, made))
