"""Creates layers whose rows are never allocated in this process: ``with deferred(min_rows=...): model = MyModel()``."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...proto.errors import FailedPrecondition, not_allowed
from ...proto.schema import Constant, Init, Normal, Uniform

_KINDS: tuple[type[nn.Embedding] | type[nn.EmbeddingBag], ...] = (nn.Embedding, nn.EmbeddingBag)
# The attribute of a layer made under deferred() that holds the initial distribution of its weight.
INIT_ATTRIBUTE = "_sparserow_deferred_init"
# In-place calls that do not change a weight's values.
_HARMLESS = frozenset({"requires_grad_", "detach_"})


def deferred_init(module: nn.Module) -> Init | None:
    """Returns the distribution that a layer's weight was initialised with under :func:`deferred`.

    It is None for a layer that was made elsewhere, and where only the layer's own constructor has initialised it.
    """
    init: Init | None = module.__dict__.get(INIT_ATTRIBUTE)
    return init


def tied_init(layers: Sequence[nn.Module]) -> Init | None:
    """Returns the distribution that layers which share one weight were initialised with under :func:`deferred`.

    It is None where only their own constructors have initialised them.

    Raises:
        FailedPrecondition: the layers were initialised in different ways, so that it is not known which one counts.
    """
    named = {init for init in map(deferred_init, layers) if init is not None}
    if len(named) > 1:
        raise FailedPrecondition(
            "deferred: layers that share one table were initialised differently: "
            f"{' and '.join(sorted(map(repr, named)))}; name a distribution with Table(init=...) in distribute"
        )
    return next(iter(named), None)


@contextmanager
def deferred(*, min_rows: int = 10_000_000) -> Iterator[None]:
    """Creates ``nn.Embedding`` and ``nn.EmbeddingBag`` of at least ``min_rows`` rows on the meta device.

    Their rows are created on the parameter servers after ``distribute``. When such a weight is initialised, the
    distribution becomes that of the table; torch's default is normal(0, 1). Recognised are ``normal_``, ``uniform_``,
    ``fill_``, ``zero_``, and the functions of ``torch.nn.init`` that call them. Only the thread that enters the context
    is affected. Such a layer stays on the meta device when its model is moved (``.to(device)``, ``.cuda()``,
    ``.to_empty()``), in its constructor or later. A change of dtype does take effect.

    Args:
        min_rows: layers with fewer rows are allocated as usual.

    Raises:
        InvalidArgument: ``min_rows`` is below 1.
        FailedPrecondition: a deferred weight is initialised in a way that a server cannot repeat; name a
            distribution with ``distribute(tables={pattern: Table(init=...)})`` and leave the weight alone.
    """
    if min_rows < 1:
        raise not_allowed("deferred.min_rows", min_rows, ">= 1")
    notes = _InitNotes()
    thread = threading.get_ident()
    originals = {kind: kind.__init__ for kind in _KINDS}
    for kind, original in originals.items():
        kind.__init__ = _on_meta(original, min_rows, thread, notes)  # type: ignore[method-assign]
    try:
        with notes:
            yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]


def _on_meta(original: Callable[..., None], min_rows: int, thread: int, notes: _InitNotes) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: nn.Embedding | nn.EmbeddingBag, num_embeddings: int, *args: Any, **kwargs: Any) -> None:
        if num_embeddings < min_rows or threading.get_ident() != thread:
            original(self, num_embeddings, *args, **kwargs)
            return
        kwargs["device"] = "meta"
        with notes.layer(self):
            original(self, num_embeddings, *args, **kwargs)
        self.__dict__["_apply"] = types.MethodType(_stay_on_meta, self)

    return init


def _stay_on_meta(
    self: nn.Embedding | nn.EmbeddingBag, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Embedding | nn.EmbeddingBag:
    """Replaces ``_apply`` of a deferred layer: moves nothing, as there are no rows, but changes the dtype."""
    del recurse  # an embedding has no children
    dtype = fn(torch.empty(0, dtype=self.weight.dtype)).dtype
    if dtype != self.weight.dtype:
        moved = torch.empty_like(self.weight, dtype=dtype, device="meta")
        self.weight = nn.Parameter(moved, requires_grad=self.weight.requires_grad)
    return self


class _InitNotes(TorchFunctionMode):
    """Intercepts every torch call and records those that fill a deferred weight."""

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[int, nn.Embedding | nn.EmbeddingBag] = {}  # by the storage of the layer's weight
        self._in_constructor = False

    @contextmanager
    def layer(self, module: nn.Embedding | nn.EmbeddingBag) -> Iterator[None]:
        """Surrounds the constructor of a layer; afterwards the layer is known."""
        self._in_constructor = True
        try:
            yield
        finally:
            self._in_constructor = False
        self._layers[_storage(module.weight)] = module

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        if self._in_constructor and name in _DISTRIBUTIONS and isinstance(target, Tensor) and target.is_meta:
            return target  # because torch takes 10 ms to draw no numbers (torch._refs)
        is_in_place = name.endswith("_") and not name.startswith("__") and name not in _HARMLESS
        if is_in_place and not self._in_constructor:
            if isinstance(target, Tensor) and target.is_meta and (layer := self._layer_of(target)) is not None:
                self._note(layer, target, func, args[1:], kwargs)
        elif func == _IS_META and not self._in_constructor and args[0].is_meta and self._layer_of(args[0]) is not None:
            self._refuse_skipped_init(self._layers[_storage(args[0])])
        return func(*args, **kwargs)

    def _layer_of(self, tensor: Tensor) -> nn.Embedding | nn.EmbeddingBag | None:
        """Returns the deferred layer whose weight ``tensor`` is a part of; None when there is no such layer.

        A weight has another storage after its dtype has changed, so the storages are read again on a miss.
        """
        layer = self._layers.get(_storage(tensor))
        if layer is None or _storage(layer.weight) != _storage(tensor):
            self._layers = {_storage(layer.weight): layer for layer in self._layers.values()}
            layer = self._layers.get(_storage(tensor))
        return layer

    @staticmethod
    def _refuse_skipped_init(layer: nn.Module) -> None:
        """Refuses an initialisation that ``torch.nn.init`` is about to skip.

        Some of its functions ask whether a weight is on the meta device, and then return without a call to record.
        """
        caller = sys._getframe(2)
        if caller.f_globals.get("__name__") == nn.init.__name__:
            _refuse(caller.f_code.co_name.removeprefix("_no_grad_"), layer)

    def _note(
        self, layer: nn.Module, target: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        weight: Any = layer.weight
        given = [float(value) for value in args[:2] if isinstance(value, int | float)]
        given += [float(kwargs[key]) for key in _ARGUMENTS if key in kwargs]
        if target.numel() < weight.numel():
            if func.__name__ in ("fill_", "zero_") and (given or [0.0]) == [0.0]:
                return  # torch zeroes the padding row, and so does distribute
        elif func.__name__ in _DISTRIBUTIONS:
            kind, defaults = _DISTRIBUTIONS[func.__name__]
            layer.__dict__[INIT_ATTRIBUTE] = kind(*given, *defaults[len(given) :])
            return
        _refuse(func.__name__, layer)


def _refuse(function: str, layer: nn.Module) -> NoReturn:
    weight: Any = layer.weight
    raise FailedPrecondition(
        f"deferred: {function} on a weight of {weight.shape[0]} rows cannot be repeated by a server; allowed: "
        f"{', '.join(_DISTRIBUTIONS)}, xavier_uniform_, xavier_normal_ on the whole weight, or Table(init=...) in "
        "distribute"
    )


# In-place fills of Tensor or torch.nn.init, with the distribution and the defaults of its arguments.
_DISTRIBUTIONS: Mapping[str, tuple[Callable[..., Init], tuple[float, ...]]] = MappingProxyType(
    {
        "normal_": (Normal, (0.0, 1.0)),
        "uniform_": (Uniform, (0.0, 1.0)),
        "fill_": (Constant, (0.0,)),
        "zero_": (Constant, (0.0,)),
        "constant_": (Constant, (0.0,)),
        "zeros_": (Constant, (0.0,)),
        "ones_": (Constant, (1.0,)),
    }
)
_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__
_ARGUMENTS = ("from", "a", "to", "b", "mean", "std", "value", "val")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
