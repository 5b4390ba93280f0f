"""The house (ARCHITECTURE.md): who may import whom, and which names the tree must not grow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "proto": {"proto"},
    "cpp_ext": {"cpp_ext"},
    "ps_server": {"ps_server", "proto", "cpp_ext"},
    "worker": {"worker", "proto", "cpp_ext"},
    "serving": {"serving", "proto", "cpp_ext"},
    "deploy": {"deploy", "proto", "cpp_ext", "ps_server", "worker", "serving"},
}
CPP_LAYERS = ("util", "schema", "optim", "store", "commit", "shards", "rpc", "session", "ops", "bindings")
# optim knows a table's schema (schema/schema.h); nothing else points upwards.
CPP_EXCEPTIONS = {("optim", "schema/schema.h")}


def python_files() -> list[Path]:
    return sorted(
        path
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


def imported_folders(path: Path) -> set[str]:
    """Top-level folders of ours that a file imports, relatively or by the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [*base, *(node.module.split(".") if node.module else [])]
            found.update([names[0]] if names else [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sparserow":
            found.update([*node.module.split(".")[1:2]] or [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            found.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sparserow."))
    return found & set(MAY_IMPORT)


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_only_what_its_folder_may(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    forbidden = imported_folders(path) - MAY_IMPORT[folder]
    assert not forbidden, (
        f"{path.relative_to(ROOT)} imports {sorted(forbidden)}; {folder} may import {MAY_IMPORT[folder]}"
    )


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_the_package_imports_tests(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not any(name.split(".")[0] == "tests" for name in names)


@pytest.mark.parametrize("folder", ["proto", "ps_server", "serving"])
def test_processes_without_torch_do_not_name_it(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            assert not any(module.split(".")[0] == "torch" for module in modules), f"{path} imports torch"


def test_cpp_layers_point_downwards() -> None:
    for path in sorted((ROOT / "cpp_ext").rglob("*.[ch]*")):
        layer = path.relative_to(ROOT / "cpp_ext").parts[0]
        if layer not in CPP_LAYERS or path.suffix not in {".cc", ".h"}:
            continue
        for line in path.read_text().splitlines():
            if not line.startswith('#include "'):
                continue
            target = line.split('"')[1]
            target_layer = target.split("/")[0]
            if target_layer not in CPP_LAYERS or (layer, target) in CPP_EXCEPTIONS:
                continue
            assert CPP_LAYERS.index(target_layer) <= CPP_LAYERS.index(layer), f"{path} includes {target}"


def test_core_names_no_torch() -> None:
    sources = [path for layer in CPP_LAYERS[:-2] for path in (ROOT / "cpp_ext" / layer).rglob("*") if path.is_file()]
    assert len(sources) > 100
    for path in sources:
        assert "torch/" not in path.read_text(), f"{path}: the core must not include torch"


def test_no_file_without_a_concept() -> None:
    banned = {"utils", "util", "common", "helpers", "helper", "misc"}
    for path in python_files():
        assert path.stem not in banned, path
    for path in (ROOT / "cpp_ext").rglob("*.h"):
        assert path.stem not in banned, path


def test_every_file_that_the_architecture_names_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tops = (*MAY_IMPORT, "tests", "docs")
    there = ["/" + path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*")]
    there += [f"/{path.name}" for path in ROOT.iterdir()]
    files = set(re.findall(r"`([\w./-]+\.(?:py|cc|h|proto|md|yaml|toml|txt))`", text))
    assert len(files) > 100
    assert [name for name in sorted(files) if not any(path.endswith(f"/{name}") for path in there)] == []
    folders = {name.rstrip("/") for name in re.findall(r"`([\w./-]+/)`", text)}
    assert [name for name in sorted(folders) if not any(path.endswith(f"/{name}") for path in there)] == []
