"""The tensors of a batch, however it is nested: tuples, lists, mappings, named tuples and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

# How to reach a tensor from its batch: indexes, keys and attributes.
Path: TypeAlias = tuple[Any, ...]
# What the native half needs of a tensor: address as the ops see it, address on the host, sizes, strides, item bytes.
Description: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...], int]

_ID_DTYPES = (torch.int64, torch.int32)


@dataclasses.dataclass(frozen=True)
class _Attribute:
    name: str


def id_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor that can hold ids: int64 or int32, strided, of at least one dimension; with its path."""
    if isinstance(value, Tensor):
        if value.dtype in _ID_DTYPES and value.layout == torch.strided and value.dim() > 0:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from id_tensors(item, (*path, key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from id_tensors(item, (*path, index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from id_tensors(getattr(value, field.name), (*path, _Attribute(field.name)))


def tensor_at(value: Any, path: Path) -> Tensor | None:
    """The tensor of ids at ``path``; None when this batch has none there."""
    for step in path:
        try:
            value = getattr(value, step.name) if isinstance(step, _Attribute) else value[step]
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    return value if isinstance(value, Tensor) and value.dtype in _ID_DTYPES else None


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed; what is no tensor stays as it is."""
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
    """A copy on the host with the same strides, the tensor itself when it is there; None when strides would differ."""
    if tensor.device.type == "cpu":
        return tensor
    host = tensor.cpu()
    return host if host.stride() == tensor.stride() else None


def description(tensor: Tensor | None, host: Tensor | None) -> Description:
    """Of a batch tensor and its copy on the host; of none, one without elements."""
    if tensor is None or host is None or tensor.stride() != host.stride():
        return (0, 0, (0,), (1,), 8)
    return (tensor.data_ptr(), host.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())
