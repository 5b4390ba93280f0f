"""The ops that gather, and ``stage_all``, on a device; on the host they stay in C++ (cpp_ext/ops).

Gathering, pooling and sums by position run on the device, a group of lookups at once (device_groups.py).
cpp_ext/torch_ops.py registers them with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .device import lookup_math as math
from .device_groups import ROWS_OF_IDS, LookupGroup, LookupOptions, Lookups, groups_of
from .device_pack import DevicePack, FoundPart
from .device_step import step_of

_OPTIONS = 6  # numbers a lookup
_HOST = torch._C.DispatchKey.CPU
_KEPT_CALLS = 64  # whose numbers stay parsed: a model has one for each place that looks rows up


@lru_cache(maxsize=_KEPT_CALLS)
def _parsed(tables: str, options: tuple[int, ...]) -> tuple[list[str], list[LookupOptions]]:
    """Returns the tables and the options of each lookup of a call."""
    names = tables.split("\n")
    return names, [LookupOptions(*options[i * _OPTIONS : (i + 1) * _OPTIONS]) for i in range(len(names))]


def gather_all(
    ids: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    anchor: Tensor,
    tables: str,
    options: list[int],
    train: bool,
) -> list[Tensor]:
    """The op ``sparserow::gather_all`` for an anchor on a device; see ``cpp_ext/ops/gather_merged.h``."""
    names, lookups = _parsed(tables, tuple(options))
    device, with_gradient = anchor.device, anchor.numel() > 0
    step = step_of(names[0])
    found: Sequence[FoundPart]
    if step.cache is not None and not train:
        found = step.cache.find(names, ids, lookups)
    else:
        step.paddings.update(
            (name, each.padding) for name, each in zip(names, lookups, strict=True) if each.padding >= 0
        )
        found = step.find(names, ids, device, train=train, with_gradient=with_gradient)
    groups = groups_of(Lookups(found, lookups, ids, offsets, weights), range(len(ids)))
    out: dict[int, Tensor] = {}
    places: dict[int, Tensor] = {}
    for group in groups:
        made, of_max = group.outputs()
        out.update(zip(group.numbers, made, strict=True))
        places.update(zip(group.numbers, of_max, strict=False))
    if train and with_gradient:
        step.remember(tables, ids, device, groups)
    return [out[i] for i in range(len(ids))] + [places[i] for i in sorted(places)]


def gather_merged(
    ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor], tables: str, options: list[int]
) -> list[Tensor]:
    """The op ``sparserow::gather_merged`` for ids on a device: rows of all lookups cross in one copy."""
    anchor = _nothing_there(*ids)
    return gather_all(ids, offsets, weights, anchor, tables, options, False)[: len(ids)]


def _nothing_there(*tensors: Tensor) -> Tensor:
    """(0) float32 on the device of the first tensor that is on one."""
    return torch.empty(0, device=next(each.device for each in tensors if each.device.type != "cpu"))


def gather(ids: Tensor, anchor: Tensor, table: str, dim: int, padding: int, train: bool) -> Tensor:
    """The op ``sparserow::gather`` for ids or an anchor on a device.

    One that trains is made on the host, as its gradient is; layers on a device call ``gather_all``.
    """
    if train:
        made: Tensor = torch.ops.sparserow.gather.default._op_dk(_HOST, ids, anchor, table, dim, padding, train)
        return made
    absent = _nothing_there(ids, anchor)
    return gather_all([ids], [absent], [absent], absent, table, [dim, ROWS_OF_IDS, padding, 0, 0, 0], False)[0]


def gather_bag(
    ids: Tensor,
    offsets: Tensor | None,
    anchor: Tensor,
    weights: Tensor | None,
    table: str,
    dim: int,
    mode: int,
    padding: int,
    includes_last: bool,
    train: bool,
) -> tuple[Tensor, Tensor]:
    """The op ``sparserow::gather_bag`` for ids or an anchor on a device; see :func:`gather`."""
    if train:
        its = (ids, offsets, anchor, weights, table, dim, mode, padding, includes_last, train)
        on_host: tuple[Tensor, Tensor] = torch.ops.sparserow.gather_bag.default._op_dk(_HOST, *its)
        return on_host
    options = [dim, mode, padding, int(includes_last), int(offsets is not None), int(weights is not None)]
    absent = _nothing_there(ids, anchor)
    made = gather_all(
        [ids], [absent if offsets is None else offsets], [absent if weights is None else weights], absent, table,
        options, False,
    )  # fmt: skip
    return made[0], made[1] if len(made) > 1 else absent.to(torch.int64)


def stage_all(
    grads: list[Tensor],
    ids: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    places: list[Tensor],
    tables: str,
    options: list[int],
    wants: list[int],
) -> list[Tensor]:
    """The op ``sparserow::stage_all`` for gradients on a device: they are kept there until the step ends."""
    del offsets  # the lookups of the step have them
    names, lookups = _parsed(tables, tuple(options))
    device = grads[0].device
    step = step_of(names[0])
    groups: Sequence[LookupGroup] = step.recall(tables, ids, device)
    of_max = dict(zip([i for i, lookup in enumerate(lookups) if lookup.mode == math.MAX], places, strict=False))
    made: dict[int, Tensor] = {}
    for group in groups:
        # No gradient has reached a lookup whose gradient has one dimension; that of an empty batch has two.
        reached = [i for i in group.numbers if grads[i].shape != (0,)]
        if not reached:
            continue
        its, mine = [grads[i] for i in reached], group.of(reached)
        assert isinstance(group.pack, DevicePack)  # rows of a cache are never trained
        step.note_gradient(group.pack, mine.gradient(its, [of_max[i] for i in reached if i in of_max]))
        if any(wants[i] for i in reached):
            made.update(zip(reached, mine.gradients_of_weights(its), strict=True))
    of_weights = [
        made[i].view(weights[i].shape).to(weights[i]) if i in made else torch.zeros_like(weights[i])
        for i in range(len(ids))
        if wants[i]
    ]
    return [torch.zeros(1, device=device), *of_weights]
