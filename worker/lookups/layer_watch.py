"""Watches the layers of a session's models for what decides whether rows train: their mode, and ``requires_grad``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable

from torch import nn

from .planned_layer import ROWS, LayerChanges, PlannedLayer


class LayerWatch:
    """The layers of a model and of its copies, as they were at the last forward.

    Args:
        set_frozen: takes the name of a binding, and whether all of its layers in the model are frozen.
    """

    def __init__(self, set_frozen: Callable[[str, bool], None]) -> None:
        self._set_frozen = set_frozen
        # The layers of each model, and whether each trains its rows; a layer of several models has one list in all.
        self._layers: weakref.WeakKeyDictionary[nn.Module, list[tuple[PlannedLayer, list[bool]]]] = (
            weakref.WeakKeyDictionary()
        )
        self._known: weakref.WeakKeyDictionary[PlannedLayer, list[bool]] = weakref.WeakKeyDictionary()
        self._seen_in_train: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # LayerChanges
        self._warned: set[str] = set()

    def watches(self, model: nn.Module) -> bool:
        """Returns whether :meth:`watch` was called for this model."""
        return model in self._layers

    def watch(self, model: nn.Module) -> None:
        """Begins to watch a model.

        Args:
            model: the root module, after its layers were swapped.
        """
        layers = [each for each in model.modules() if isinstance(each, PlannedLayer)]
        self._layers[model] = [(layer, self._known.setdefault(layer, [not layer.is_frozen])) for layer in layers]

    def look_at(self, model: nn.Module) -> None:
        """Looks, before a forward, which layers were frozen or thawed since the last one, and says so to the session.

        Raises:
            FailedPrecondition: a layer was frozen whose rows are on the devices of the ranks.
        """
        layers = self._layers[model]
        changed = [
            (layer, known)
            for layer, known in layers
            if ((weight := layer._parameters.get(ROWS)) is None or weight.requires_grad) is not known[0]
        ]
        if not changed:
            return
        for binding in {layer.binding for layer, _ in changed}:
            self._set_frozen(binding, all(layer.is_frozen for layer, _ in layers if layer.binding == binding))
        for layer, known in changed:
            known[0] = not layer.is_frozen
        LayerChanges.count += 1

    def warn_of_eval(self, model: nn.Module) -> None:
        """Warns, once of each table, of layers in eval mode within a model in train mode.

        Their rows do not train, although plain torch's would.
        """
        changes = LayerChanges.count
        if self._seen_in_train.get(model) == changes:
            return
        self._seen_in_train[model] = changes
        for layer, _ in self._layers[model]:
            if not (layer.training or layer.is_frozen) and layer.binding not in self._warned:
                self._warned.add(layer.binding)
                warnings.warn(
                    f"table {layer.binding!r}: its layer is in eval mode within a model in train mode, so its rows do "
                    "not train; call train() on the layer, or freeze the table to keep its rows on purpose",
                    UserWarning,
                    stacklevel=2,
                )
