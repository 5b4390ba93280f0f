"""Reads the rows of planned lookups from the devices of the ranks, by one exchange of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....proto.errors import SparserowError
from ...device_tables.device_tables import tables_of
from ...device_tables.id_keys import WantedIds, keys_of_all
from ...device_tables.lookup import ReadRows, read_together
from ...device_tables.made_together import Call, with_outputs
from ..planned_layer import PlannedLayer
from .tensor_group import LookupCall


def anchor_of(layer: PlannedLayer) -> Tensor:
    """Returns the anchor of a layer, without gradient in eval mode."""
    return layer.anchor if layer.training else layer.anchor.detach()


def look_all_up(lookups: Sequence[LookupCall], digest: int) -> list[ReadRows] | None:
    """Reads the rows of a forward's lookups by one exchange of the ranks.

    Args:
        lookups: of layers whose tables are on devices.
        digest: that of their plan.

    Returns:
        What each layer takes; None where this rank's ids are refused, for which the layer raises, or where another rank
        does not make these lookups now.

    Raises:
        SparserowError: a rank is gone, late or in another call, or has refused the lookups.
    """
    layers = [lookup.layer for lookup in lookups]
    try:
        tables_of(layers[0].binding).check_usable()
        keys = keys_of_all(
            [
                WantedIds(layer.binding, lookup.arguments[0], anchor_of(layer), layer.padding_idx)
                for layer, lookup in zip(layers, lookups, strict=True)
            ]
        )
    except (SparserowError, ValueError):
        return None
    read = read_together(keys, digest)
    if read is None:
        return None
    return with_outputs(
        [
            Call(rows, anchor_of(layer), ids, layer.mode_number, layer.include_last_offset, offsets, weights)
            for rows, layer, (ids, offsets, weights) in zip(
                read, layers, (lookup.arguments for lookup in lookups), strict=True
            )
        ]
    )
