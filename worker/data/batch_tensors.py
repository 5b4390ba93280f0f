"""Finds and maps the tensors of a nested batch: tuples, lists, mappings, named tuples, dataclasses, jagged tensors.

A keyed jagged tensor is any object with the methods of torchrec's ``KeyedJaggedTensor``; torchrec is not imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...cpp_ext.device.link import link_of

# The indexes, keys and attributes that lead from a batch to a tensor.
Path: TypeAlias = tuple[Any, ...]
# A tensor for the native half: address as the ops see it, address on the host, sizes, strides, bytes per item.
Description: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], int]

_ID_DTYPES = (torch.int64, torch.int32)
_ABSENT: Description = (0, 0, (0,), (1,), 8)


@dataclasses.dataclass(frozen=True)
class _Attribute:
    name: str


@dataclasses.dataclass(frozen=True)
class _JaggedKey:
    """One key of a keyed jagged tensor; None stands for the values of all keys."""

    name: str | None


def tensors_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yields every tensor of a batch with its path, which begins with ``path``."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, (*path, key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors_of(item, (*path, index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), (*path, _Attribute(field.name)))
    elif _is_jagged_by_key(value):
        for step in _jagged_steps(value):
            part = _jagged_part(value, step)
            if part is not None:
                yield (*path, step), part


def id_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yields, with its path, every tensor that can hold ids: int64 or int32, strided, with at least one dimension."""
    return (item for item in tensors_of(value, path) if can_hold_ids(item[1]) and item[1].dim() > 0)


def can_hold_ids(tensor: Tensor) -> bool:
    """Returns whether a lookup accepts this tensor as ids: it must be int64 or int32, and strided."""
    return tensor.dtype in _ID_DTYPES and tensor.layout == torch.strided


def tensor_at(value: Any, path: Path) -> Tensor | None:
    """Returns the tensor at ``path``; None when this batch has no tensor there."""
    for step in path:
        try:
            if isinstance(step, _JaggedKey):
                value = _jagged_part(value, step) if _is_jagged_by_key(value) else None
            else:
                value = getattr(value, step.name) if isinstance(step, _Attribute) else value[step]
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    return value if isinstance(value, Tensor) else None


def _is_jagged_by_key(value: Any) -> bool:
    kind = type(value)
    return all(callable(getattr(kind, name, None)) for name in ("keys", "values")) and any(
        callable(getattr(kind, name, None)) for name in ("offset_per_key", "to_dict")
    )


def _jagged_steps(value: Any) -> tuple[_JaggedKey, ...]:
    try:
        return tuple(_JaggedKey(name) for name in (*value.keys(), None))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return ()


def _jagged_part(value: Any, step: _JaggedKey) -> Tensor | None:
    """Returns the values of a key as a view of all values; None when the object does not act like a jagged tensor."""
    try:
        if not hasattr(type(value), "offset_per_key"):
            part = value.values() if step.name is None else value.to_dict()[step.name].values()
        elif step.name is None:
            part = value.values()
        else:
            index, offsets = list(value.keys()).index(step.name), value.offset_per_key()
            part = value.values()[offsets[index] : offsets[index + 1]]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    return part if isinstance(part, Tensor) else None


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns the batch with ``change`` applied to every tensor; other values stay."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: map_tensors(item, change) for name, item in parts.items()})
    return value


def on_host(tensor: Tensor) -> Tensor | None:
    """Returns the tensor on the host with the same strides; None when a copy would have other strides."""
    if tensor.device.type == "cpu":
        return tensor
    host = tensor.cpu()
    return host if host.stride() == tensor.stride() else None


def description(tensor: Tensor | None, host: Tensor | None) -> Description:
    """Returns the description of a tensor and its copy on the host.

    It describes a tensor without elements when either is None or their strides differ.
    """
    if tensor is None or host is None or tensor.stride() != host.stride():
        return _ABSENT
    return (address_of(tensor), host.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())


def address_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's first element, on whichever side of the bus it lies."""
    if tensor.device.type == "cpu":
        return tensor.data_ptr()
    return link_of(tensor.device).address(tensor)
