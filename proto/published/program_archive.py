"""Checks the archive of an exported program, and writes it anew before torch opens it.

A program from a file is code: torch.export.load unpickles example inputs, marked tensors and custom objects.
It also evaluates expressions and guards, and looks up operators by name.
This module gives torch a new archive, which has only the entries that a publication writes, each of them checked.
A second reader of the same bytes cannot see other entries.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..errors import DataLoss
from .program_code import IsOperator, check_code

_MODEL = "models/model.json"
_EXAMPLE = "data/sample_inputs/model.pt"
_CONFIGS = {
    "data/weights/model_weights_config.json": ("data/weights/", re.compile(r"weight_\d{1,9}")),
    "data/constants/model_constants_config.json": ("data/constants/", re.compile(r"tensor_\d{1,9}")),
}
_FACTS = frozenset(
    {"archive_format", "archive_version", "byteorder", "version", ".data/version", ".data/serialization_id"}
)
_MOST_ENTRIES = 100_000
_MOST_JSON_BYTES = 64 << 20
_AGAIN = "publish the model again"


def confined(data: bytes, where: str, *, is_signed: bool, is_operator: IsOperator) -> bytes:
    """Returns the program as a new archive that torch.export.load may open: nothing in it is pickled.

    Example inputs are left out without being read.

    Args:
        data: the archive as it was published.
        where: the name of the archive, which begins an error message.
        is_signed: whether a trusted publisher signed the program, which may then use operators of other libraries.
        is_operator: says whether torch has an operator of a given namespace, name and overload.

    Raises:
        DataLoss: the bytes are no such archive, or an entry has something that torch would unpickle or run; the text
            names the entry.
    """
    try:
        entries = _read(data, where)
        for config, (folder, names) in _CONFIGS.items():
            _check_tensors(entries, config, folder, names, where)
        check_code(_json(entries, _MODEL, where), where, is_signed=is_signed, is_operator=is_operator)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, zipfile.BadZipFile) as error:
        raise DataLoss(
            f"{where}: the file is not a program that this version reads: {type(error).__name__}: {error}"
        ) from None
    return _written({**entries, _EXAMPLE: b""})


def _read(data: bytes, where: str) -> dict[str, bytes]:
    """Returns the entries that a publication writes, by their names below the archive's own folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        if len(infos) > _MOST_ENTRIES or sum(info.file_size for info in infos) > len(data):
            raise DataLoss(f"{where}: its entries are larger than the file; {_AGAIN}")
        roots = {info.filename.partition("/")[0] for info in infos}
        names = [info.filename.partition("/")[2] for info in infos]
        if len(roots) != 1 or max(Counter(names).values()) > 1:
            raise DataLoss(f"{where}: its entries are ambiguous; {_AGAIN}")
        entries = {}
        for info, name in zip(infos, names, strict=True):
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
                raise DataLoss(f"{where}: entry {name[:80]!r} is compressed; {_AGAIN}")
            if name == _EXAMPLE:
                continue
            if not _is_expected(name):
                raise DataLoss(f"{where}: entry {name[:80]!r} may hold code, and a program has no such entry; {_AGAIN}")
            entries[name] = archive.read(info)
    return entries


def _is_expected(name: str) -> bool:
    tensors = any(
        name.startswith(folder) and names.fullmatch(name[len(folder) :]) for folder, names in _CONFIGS.values()
    )
    return name == _MODEL or name in _FACTS or name in _CONFIGS or tensors


def _json(entries: Mapping[str, bytes], name: str, where: str) -> Any:
    if len(entries[name]) > _MOST_JSON_BYTES:
        raise DataLoss(f"{where}: {name} has {len(entries[name])} bytes; allowed: at most {_MOST_JSON_BYTES}")
    return json.loads(entries[name].decode("utf-8"))


def _check_tensors(entries: Mapping[str, bytes], config: str, folder: str, names: re.Pattern[str], where: str) -> None:
    """Refuses a tensor that is not stored as raw bytes, or whose sizes are not valid."""
    for fqn, payload in _json(entries, config, where)["config"].items():
        file = payload["path_name"]
        if payload["use_pickle"] is not False or not names.fullmatch(file):
            raise DataLoss(f"{where}: tensor {fqn[:80]!r} is pickled, and a pickle may run code; {_AGAIN}")
        sizes = [size["as_int"] for size in payload["tensor_meta"]["sizes"]]
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise DataLoss(f"{where}: tensor {fqn[:80]!r} has sizes {sizes}")
        if not entries[folder + file] and math.prod(sizes):
            raise DataLoss(f"{where}: tensor {fqn[:80]!r} has no bytes")


def _written(entries: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return out.getvalue()
