"""Reads trees of nested containers from a safetensors file: tensors as tensors, all else as JSON in its header.

The file has no pickled objects, so reading it runs no code, and any program can open it.
``worker/checkpoint/state_tree.py`` writes such files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from ..documents import parse_json
from ..errors import DataLoss
from .tensor_file import MOST_HEADER_BYTES, Tensor, check_sum, decode

FORMAT = "1"
TREE_KEY, FORMAT_KEY = "sparserow.state", "sparserow.format"

# Its arguments are an array that it may keep, and whether the array's uint16 are bits of bfloat16.
MakeTensor = Callable[[NDArray[Any], bool], Any]


def decode_tree(data: memoryview, name: str, make_tensor: MakeTensor) -> dict[str, Any]:
    """Returns the tree of a file: nested dicts, lists and tuples of tensors, arrays, numbers, strings and None.

    Args:
        data: the bytes of the file.
        name: the name of the file, which error messages have.
        make_tensor: makes a tensor of an array that owns its memory; its second argument says whether the array's
            uint16 are bits of bfloat16.

    Raises:
        DataLoss: the file is damaged, or its format is unknown.
    """
    metadata, tensors = decode(data, name)
    if metadata.get(FORMAT_KEY) != FORMAT:
        raise DataLoss(f"{name}: the file has format {metadata.get(FORMAT_KEY)!r}; this program reads {FORMAT}")
    check_sum(metadata, list(tensors.values()), name)
    try:
        tree = _whole(parse_json(metadata[TREE_KEY].encode(), name, MOST_HEADER_BYTES), tensors, make_tensor)
    except (KeyError, ValueError, TypeError) as error:
        raise DataLoss(f"{name}: is damaged: {error}") from None
    if not isinstance(tree, dict):
        raise DataLoss(f"{name}: is damaged: its state is a {type(tree).__name__}; allowed: a mapping")
    return tree


def _whole(value: Any, tensors: Mapping[str, Tensor], make_tensor: MakeTensor) -> Any:
    if isinstance(value, list):
        return [_whole(item, tensors, make_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$tensor"}:
        tensor = tensors[value["$tensor"]]
        return make_tensor(tensor.values.copy(), tensor.dtype == "BF16")
    if value.keys() == {"$array"}:
        return tensors[value["$array"]].values.copy()
    if value.keys() == {"$tuple"}:
        return tuple(_whole(item, tensors, make_tensor) for item in value["$tuple"])
    if value.keys() == {"$dict"}:
        pairs = value["$dict"]
        return {_whole(key, tensors, make_tensor): _whole(item, tensors, make_tensor) for key, item in pairs}
    return {key: _whole(item, tensors, make_tensor) for key, item in value.items()}
