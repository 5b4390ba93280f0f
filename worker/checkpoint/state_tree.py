"""Encodes states of optimizers, models and loaders as safetensors; ``proto/checkpoint/state_tree.py`` decodes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...cpp_ext.torch_arrays import SAFETENSORS_NAMES
from ...proto.checkpoint.state_tree import FORMAT, FORMAT_KEY, TREE_KEY
from ...proto.checkpoint.tensor_file import DTYPES, Encoded, Tensor, encode
from ...proto.errors import InvalidArgument

_OF_NUMPY = {np.dtype(dtype): name for name, dtype in DTYPES.items() if name not in ("BF16", "F16")}
_OF_NUMPY[np.dtype(np.float16)] = "F16"


def encode_tree(tree: Mapping[str, Any], metadata: Mapping[str, str]) -> Encoded:
    """Encodes nested dicts, lists and tuples of tensors, arrays, numbers, strings and None as one file.

    Args:
        tree: the values.
        metadata: further entries of the file's metadata.

    Raises:
        InvalidArgument: the tree holds a value of another type; the text has its path.
    """
    tensors: dict[str, Tensor] = {}
    plain = _plain(tree, "", tensors)
    return encode(tensors, {**metadata, FORMAT_KEY: FORMAT, TREE_KEY: json.dumps(plain)})


def _plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": _add(value, path, tensors)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype in _OF_NUMPY:
        tensors[name := _free(path, tensors)] = Tensor(_OF_NUMPY[value.dtype], np.ascontiguousarray(value))
        return {"$array": name}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _plain(item, f"{path}.{key}" if path else key, tensors) for key, item in value.items()}
        items = [[_plain(key, path, tensors), _plain(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return {"$dict": items}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise InvalidArgument(
        f"save: {path or 'the state'} is a {type(value).__name__}, which no checkpoint can hold; allowed: tensors, "
        "arrays, numbers, strings, None, and dicts, lists and tuples of these"
    )


def _free(path: str, tensors: Mapping[str, Tensor]) -> str:
    name, number = path or "value", 1
    while name in tensors:
        number += 1
        name = f"{path}#{number}"
    return name


def _add(value: torch.Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    on_host = value.detach().to("cpu").contiguous()
    if on_host.dtype not in SAFETENSORS_NAMES or on_host.layout is not torch.strided:
        raise InvalidArgument(
            f"save: {path} is a tensor of {on_host.dtype} and {on_host.layout}; allowed: dense, of real numbers"
        )
    is_bfloat16 = on_host.dtype is torch.bfloat16
    values = on_host.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else on_host.numpy()
    if on_host.data_ptr() == value.data_ptr():
        values = values.copy()  # as training changes the tensor while the file is written
    tensors[name := _free(path, tensors)] = Tensor(SAFETENSORS_NAMES[on_host.dtype], values)
    return name
