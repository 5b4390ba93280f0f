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
RPC_BASE = {"rpc/wire", "rpc/transport", "rpc/observe"}
# A room of cpp_ext may include its own files, the layers left of its own, and these rooms of its layer.
CPP_ROOMS = {
    "rpc/wire": set(),
    "rpc/transport": {"rpc/wire"},
    "rpc/observe": {"rpc/wire", "rpc/transport"},
    "rpc/client": RPC_BASE,
    "rpc/server": RPC_BASE,
    "store/table": set(),
    "store/ssd": set(),
    "store": {"store/table", "store/ssd"},
    "store/changes": {"store", "store/table"},
}
# A store creates its log of changes, which reads the store's own maps.
CPP_EXCEPTIONS = {("store/store.cc", "store/changes/change_log.h")}
# A room of Python may import its own files, other top-level folders as MAY_IMPORT says, and these rooms of its folder.
SESSION = {"worker/cache", "worker/id_trace", "worker/membership", "worker/session"}
LOCAL = {"deploy/launch", "deploy/train"}
PYTHON_ROOMS = {
    "worker": set(),
    "worker/cache": set(),
    "worker/membership": set(),
    "worker/metrics": set(),
    "worker/models": set(),
    "worker/data": {"worker/metrics"},
    "worker/id_trace": {"worker/data"},
    "worker/session": SESSION,
    "worker/layers": {*SESSION, "worker/data"},
    "worker/prefetch": {*SESSION, "worker/data"},
    "worker/row_files": SESSION,
    "worker/checkpoint": {*SESSION, "worker/layers"},
    "worker/publish": {*SESSION, "worker/layers", "worker/checkpoint"},
    "worker/gateway": SESSION,
    "worker/training": {
        *SESSION,
        *("worker/checkpoint", "worker/data", "worker/layers", "worker/metrics", "worker/models", "worker/prefetch"),
    },
    "serving/client": set(),
    "serving/inference": {"serving/client"},
    "serving": {"serving/client"},
    "ps_server": set(),
    "ps_server/process": set(),
    "ps_server/shard": {"ps_server/process"},
    "ps_server/coordinator/state": set(),
    "ps_server/coordinator/storage": set(),
    "ps_server/coordinator/procedures": {"ps_server/coordinator/state"},
    "ps_server/coordinator": {
        "ps_server/process",
        *(f"ps_server/coordinator/{room}" for room in ("state", "storage", "procedures")),
    },
    "deploy": set(),
    "deploy/launch": set(),
    "deploy/observe": set(),
    "deploy/preflight": set(),
    "deploy/examples": {"deploy/launch"},
    "deploy/train": {"deploy/launch"},
    "deploy/ray": LOCAL,
    "deploy/bench": LOCAL,
    "deploy/reference": {"deploy/train"},
    "deploy/commands": {
        *LOCAL,
        *(f"deploy/{room}" for room in ("bench", "examples", "observe", "preflight", "ray")),
    },
}


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
        if path.parent == ROOT / "serving" / "inference":
            continue  # runs programs in processes of users; test_serving_loads_no_torch sees the servers' processes
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            assert not any(module.split(".")[0] == "torch" for module in modules), f"{path} imports torch"


def cpp_includes() -> list[tuple[Path, str]]:
    """(file, what it includes) of the layers; both are relative to cpp_ext."""
    return [
        (path.relative_to(ROOT / "cpp_ext"), line.split('"')[1])
        for layer in CPP_LAYERS
        for path in sorted((ROOT / "cpp_ext" / layer).rglob("*"))
        if path.suffix in {".cc", ".h"}
        for line in path.read_text().splitlines()
        if line.startswith('#include "')
    ]


def test_every_file_of_the_core_is_in_a_layer() -> None:
    sources = [path for path in (ROOT / "cpp_ext").rglob("*") if path.suffix in {".cc", ".h"}]
    assert {path.relative_to(ROOT / "cpp_ext").parts[0] for path in sources} == set(CPP_LAYERS)


def test_cpp_layers_point_downwards() -> None:
    for path, target in cpp_includes():
        layer, target_layer = path.parts[0], target.split("/")[0]
        if target_layer in CPP_LAYERS:
            assert CPP_LAYERS.index(target_layer) <= CPP_LAYERS.index(layer), f"{path} includes {target}"


def test_cpp_rooms_of_one_layer_have_no_circle() -> None:
    named = set()
    for path, target in cpp_includes():
        room, target_room = path.parent.as_posix(), target.rpartition("/")[0]
        if target_room == room or target_room.split("/")[0] != path.parts[0]:
            continue
        if (path.as_posix(), target) in CPP_EXCEPTIONS:
            named.add((path.as_posix(), target))
            continue
        assert target_room in CPP_ROOMS[room], f"{path} includes {target}; {room} may include {CPP_ROOMS[room]}"
    assert named == CPP_EXCEPTIONS  # an exception that is no longer needed goes


def imported_rooms(path: Path) -> set[str]:
    """Folders of ours, relative to the root, from which a file imports."""
    package = path.relative_to(ROOT).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else []))
        for alias in node.names:
            parts = (*base, alias.name)
            while parts and not ROOT.joinpath(*parts).is_dir():
                parts = parts[:-1]
            found.add("/".join(parts))
    return found


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_rooms_of_one_folder_have_no_circle(path: Path) -> None:
    room = path.relative_to(ROOT).parent.as_posix()
    top = room.split("/")[0]
    if top in ("proto", "cpp_ext"):
        return
    others = {other for other in imported_rooms(path) - {room} if other.split("/")[0] == top}
    forbidden = others - PYTHON_ROOMS[room]
    assert not forbidden, (
        f"{path.relative_to(ROOT)} imports {sorted(forbidden)}; {room} may import {PYTHON_ROOMS[room]}"
    )


@pytest.mark.parametrize("rooms", [CPP_ROOMS, PYTHON_ROOMS], ids=["cpp", "python"])
def test_the_rooms_that_may_be_imported_have_no_circle(rooms: dict[str, set[str]]) -> None:
    left = {room: {other for other in others if other != room} for room, others in rooms.items()}
    while left:
        floor = {room for room, others in left.items() if not others & left.keys()}
        assert floor, f"these import each other: {sorted(left)}"
        left = {room: others for room, others in left.items() if room not in floor}


def test_the_state_of_a_cluster_needs_no_loop_no_network_and_no_clock() -> None:
    """Times are passed in, so that a test says what time it is."""
    files = sorted((ROOT / "ps_server" / "coordinator" / "state").glob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else names
            assert not {module.split(".")[0] for module in modules} & {"asyncio", "grpc", "time", "threading"}, path
            assert not (isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today")), path


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
