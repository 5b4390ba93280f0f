"""Finds layers whose ``requires_grad`` has changed since the last forward, and tells the session."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from .embedding import DistributedLayer
from .rows_ahead import LayerChanges


class FrozenLayers:
    """What a session knows of the frozen layers of its models. The copies of a model share it.

    Args:
        tell: takes the name of a binding, and whether all of its layers in the model are frozen.
    """

    def __init__(self, tell: Callable[[str, bool], None]) -> None:
        self._tell = tell
        self._layers: weakref.WeakKeyDictionary[nn.Module, list[DistributedLayer]] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[DistributedLayer, bool] = weakref.WeakKeyDictionary()

    def watch(self, model: nn.Module) -> None:
        """Begins to look at the layers of a model, as they are now.

        Args:
            model: the root module, after its layers were swapped.
        """
        layers = [each for each in model.modules() if isinstance(each, DistributedLayer)]
        self._layers[model] = layers
        for layer in layers:
            self._known.setdefault(layer, layer.is_frozen)

    def look_at(self, model: nn.Module) -> None:
        """Looks at the layers of a model before a forward.

        Raises:
            FailedPrecondition: a layer was frozen whose rows are on the devices of the ranks.
        """
        layers, known = self._layers[model], self._known
        changed = [layer for layer in layers if layer.is_frozen is not known[layer]]
        if not changed:
            return
        for binding in {layer.binding for layer in changed}:
            self._tell(binding, all(layer.is_frozen for layer in layers if layer.binding == binding))
        for layer in changed:
            known[layer] = layer.is_frozen
        LayerChanges.count += 1
