"""Warns of layers in eval mode within a model in train mode, whose rows do not train although plain torch's would."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

from .embedding import DistributedLayer
from .rows_ahead import LayerChanges


class EvalWarning:
    """Warns once of each table. The copies of a model share it."""

    def __init__(self) -> None:
        self._looked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()

    def look_at(self, model: nn.Module) -> None:
        """Looks at the layers of a model in train mode before a forward, if the mode of any layer has changed.

        Args:
            model: the root module.
        """
        changes = LayerChanges.count
        if self._looked.get(model) == changes:
            return
        self._looked[model] = changes
        for layer in model.modules():
            if (
                isinstance(layer, DistributedLayer)
                and not (layer.training or layer.is_frozen)
                and layer.binding not in self._told
            ):
                self._told.add(layer.binding)
                warnings.warn(
                    f"table {layer.binding!r}: its layer is in eval mode within a model in train mode, so its rows do "
                    "not train; call train() on the layer, or freeze the table to keep its rows on purpose",
                    UserWarning,
                    stacklevel=2,
                )
