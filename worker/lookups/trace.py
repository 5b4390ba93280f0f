"""Traces, through torch's dispatcher, which values computed from a forward's arguments reach its lookups as ids.

Traced are views and casts, and arithmetic of one argument with constants, such as ``keys % rows``. A constant is a
number, or a small tensor on the host that was there before the forward, such as the sizes of tables.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ..data.batch_tensors import can_hold_ids, tensors_of
from .expressions import Derived, Expression, Operation, Root, TracedIds

# Operations whose result has the values of their first argument; only the dtype or the memory may differ.
_CASTS = frozenset(("_to_copy", "to", "clone", "contiguous", "alias", "detach", "lift_fresh", "view_as"))
# Operations that keep the ids in the same flattened order, whatever the strides: the result's shape determines them.
_RESHAPES = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"))
# Views that are determined by the operation's arguments.
_TURNS = frozenset(("squeeze", "unsqueeze", "transpose", "swapaxes", "t", "permute", "movedim", "expand"))
_PARTS = frozenset(("select", "narrow", "unbind", "split", "split_with_sizes", "chunk", "tensor_split"))
_VIEWS = _TURNS | _PARTS | {"unsafe_split", "unsafe_chunk"}
_MAX_VALUES = 4096  # of a tensor that is a constant, as its values are compared
_WITHOUT_SIZES = frozenset(
    ("select", "unbind", "squeeze", "unsqueeze", "transpose", "swapaxes", "t", "permute", "movedim")
)
# Operations by element whose result depends on nothing but the first argument and constants.
_ARITHMETIC = frozenset(
    (
        *("remainder", "fmod", "floor_divide", "add", "sub", "rsub", "mul", "neg", "abs"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "__and__"),
        *("__or__", "__xor__", "__lshift__", "__rshift__", "clamp", "clamp_min", "clamp_max"),
    )
)


class ForwardTrace(TorchDispatchMode):
    """A dispatch mode that traces one forward. The same thread enters it before the forward and leaves it after.

    Args:
        arguments: the arguments of the forward. Tensors in them, of any dtype, are the roots of the expressions.
    """

    supports_higher_order_operators = True

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.is_active = True
        self._thread = threading.get_ident()
        self._roots: dict[Root, Tensor] = {}
        # Tensor -> its expression, its root, and its version at that time: a tensor changed since is unknown.
        self._known = WeakTensorKeyDictionary()
        self._made: dict[tuple[Any, ...], Derived] = {}
        self._results = WeakTensorKeyDictionary()  # of operations of the forward; other tensors were there before it
        # Keeps the ids of every lookup alive until the trace is read, so that no two have the same address.
        self._looked_up: list[Tensor] = []
        self._traced: list[TracedIds] = []
        for path, tensor in tensors_of(arguments):
            if type(tensor) is Tensor and tensor.layout == torch.strided and tensor not in self._known:
                root = Root(path)
                self._roots[root] = tensor
                self._known[tensor] = (root, root, _version(tensor))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch compile and run compiled parts of the model as if there were no trace."""
        return True

    @property
    def is_of_this_thread(self) -> bool:
        """Whether the calling thread is the one that entered the trace."""
        return self._thread == threading.get_ident()

    def leave(self) -> list[TracedIds]:
        """Ends the trace and returns, in order, the ids of lookups that are computed from the arguments."""
        self.is_active = False
        if self.is_of_this_thread and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        traced, self._traced = self._traced, []
        self._looked_up, self._roots = [], {}
        return traced

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs the operation unchanged, and records lookups and results that are computed from the arguments."""
        namespace = func.namespace if self.is_active and isinstance(func, torch._ops.OpOverload) else ""
        if namespace == "sparserow":
            for ids in _id_arguments(args):
                self._note_lookup(ids)
        made = func(*args, **(kwargs or {}))
        if namespace == "aten" and args:
            self._note_result(func, args, kwargs or {}, made)
        if self.is_active:
            for result in made if isinstance(made, tuple | list) else (made,):
                if isinstance(result, Tensor):
                    self._results[result] = True
        return made

    def expression_of(self, tensor: Tensor) -> Expression | None:
        """Returns the expression of a tensor in terms of the forward's arguments; None where it is not known."""
        known = self._of(tensor)
        return None if known is None else known[0]

    def _note_lookup(self, ids: Tensor) -> None:
        self._looked_up.append(ids)
        known = self._of(ids)
        if known is not None:
            expression, root = known
            self._traced.append(TracedIds(ids, expression, self._roots[root]))

    def _of(self, tensor: Any) -> tuple[Expression, Root] | None:
        if not isinstance(tensor, Tensor):
            return None
        expression, root, version = self._known.get(tensor, (None, None, 0))
        return None if expression is None or version != _version(tensor) else (expression, root)

    def _note_result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        known = self._of(args[0])
        if known is None or made is args[0]:
            return
        if isinstance(made, Tensor):
            self._note(func, args, kwargs, known, made, None)
        elif isinstance(made, tuple | list):
            for index, tensor in enumerate(made):
                if isinstance(tensor, Tensor):
                    self._note(func, args, kwargs, known, tensor, index)

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: tuple[Expression, Root],
        made: Tensor,
        output: int | None,
    ) -> None:
        if type(made) is not Tensor or made.layout != torch.strided:
            return
        expression, root = known
        others = [argument for argument in args[1:] if isinstance(argument, Tensor)]
        if any(other in self._results or other in self._known for other in others):
            return
        key, operation = _operation(func, args, kwargs, made)
        if key is None:
            return
        if operation is not None:
            derived = (id(expression), output, *key)
            made_of = Derived(expression, operation, output, repr(key), _has_sizes(func, made))
            expression = self._made.setdefault(derived, made_of)
        # A view shares its base's version, but torch shows this only after the operation has returned.
        self._known[made] = (expression, root, _version(args[0] if func.is_view else made))


def _operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor
) -> tuple[tuple[Any, ...] | None, Operation | None]:
    """Classifies an operation of torch.

    Returns:
        A key that identifies the operation with its arguments, and the operation as a function of its first argument.
        The function is None when values stay as they are; both are None for an operation that is not traced.
    """
    name, given = func.overloadpacket.__name__, args[0]
    if name in _CASTS and (name != "view_as" or made.shape == given.shape):
        return (made.dtype,), None if made.dtype == given.dtype else partial(torch.Tensor.to, dtype=made.dtype)
    rest = args[1:]
    if name in _ARITHMETIC and len(rest) == 1 and isinstance(rest[0], Tensor) and not kwargs:
        return _with_tensor(func, rest[0]) if made.dtype == given.dtype and made.shape == given.shape else (None, None)
    if not all(_is_constant(argument) for argument in (*rest, *kwargs.values())) or made.dtype != given.dtype:
        return None, None
    if name in _RESHAPES:
        return _reshape(made)
    if name == "slice":
        return _slice(given, *rest, **kwargs)
    if name in _VIEWS:
        is_same = made.shape == given.shape and made.stride() == given.stride()
        if is_same and made.data_ptr() == given.data_ptr():
            return (name,), None
        return (func, repr(rest), repr(kwargs)), lambda tensor: func(tensor, *rest, **kwargs)
    if name in _ARITHMETIC:
        return (func, repr(rest), repr(kwargs)), lambda tensor: func(tensor, *rest, **kwargs)
    return None, None


def _with_tensor(func: Any, constant: Tensor) -> tuple[tuple[Any, ...] | None, Operation | None]:
    """Returns an operation with a tensor of the model, which has few values and is on the host; else (None, None)."""
    if type(constant) is not Tensor or not constant.is_cpu or constant.numel() > _MAX_VALUES:
        return None, None
    values = str(constant.dtype), tuple(constant.shape), tuple(constant.flatten().tolist())
    return (func, *values), lambda tensor: func(tensor, constant)


def _has_sizes(func: Any, made: Tensor) -> bool:
    """Returns whether the arguments of a traced operation have sizes or bounds, which a batch may have determined."""
    name = func.overloadpacket.__name__
    if name in _RESHAPES:
        return made.dim() > 1
    return name not in _CASTS and name not in _ARITHMETIC and name not in _WITHOUT_SIZES


def _reshape(made: Tensor) -> tuple[tuple[Any, ...], Operation]:
    """Returns a reshape whose first size is inferred from the others, since batches differ in length."""
    shape = (-1, *made.shape[1:]) if 0 not in made.shape[1:] else tuple(made.shape)
    return ("reshape", shape), lambda tensor: tensor.reshape(shape)


def _slice(
    given: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[tuple[Any, ...], Operation | None]:
    """Returns a slice; a range that reached the end in the traced batch reaches the end of every batch."""
    first = start or 0
    last = sys.maxsize if end is None or end >= given.shape[dim] else end
    if first == 0 and last == sys.maxsize and step == 1:
        return ("slice",), None
    slice_ = torch.ops.aten.slice.Tensor
    return ("slice", dim, first, last, step), lambda tensor: slice_(tensor, dim, first, last, step)


def _is_constant(argument: Any) -> bool:
    if isinstance(argument, tuple | list):
        return all(_is_constant(item) for item in argument)
    return argument is None or isinstance(argument, int | float | bool | torch.memory_format)


def _id_arguments(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if can_hold_ids(argument):
                yield argument
        elif isinstance(argument, tuple | list):
            yield from _id_arguments(argument)


def _version(tensor: Tensor) -> int:
    """Returns how often the tensor was changed in place; 0 for an inference tensor, for which torch does not count."""
    return 0 if tensor.is_inference() else tensor._version
