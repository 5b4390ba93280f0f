"""The house (ARCHITECTURE.md): who may import whom, and which names the tree must not grow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rooms import (
    CPP_EXCEPTIONS,
    CPP_LAYERS,
    CPP_ROOMS,
    MAY_IMPORT,
    PYTHON_ROOMS,
    ROOT,
    cpp_includes,
    imported_rooms,
    python_files,
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


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_rooms_of_one_folder_have_no_circle(path: Path) -> None:
    room = path.relative_to(ROOT).parent.as_posix()
    top = room.split("/")[0]
    if room == "cpp_ext" or top == "proto":
        return
    others = {other for other in imported_rooms(path) - {room} if other.split("/")[0] == top}
    forbidden = others - PYTHON_ROOMS[room]
    assert not forbidden, (
        f"{path.relative_to(ROOT)} imports {sorted(forbidden)}; {room} may import {PYTHON_ROOMS[room]}"
    )


def test_the_device_floor_needs_nothing_of_ours() -> None:
    for path in (ROOT / "cpp_ext" / "device").glob("*.py"):
        assert imported_rooms(path) <= {"cpp_ext/device"}, path


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


ROOMS = sorted(
    {f"cpp_ext/{room}" for room in (*CPP_ROOMS, *CPP_LAYERS) if room != "rpc"}
    | {room for room in PYTHON_ROOMS if room.split("/")[0] != "deploy"}
)


def allowed_imports(room: str) -> set[str]:
    """What a room may import, as the layer tests have it."""
    top, _, name = room.partition("/")
    if top == "cpp_ext" and room not in PYTHON_ROOMS:
        layer = name.split("/")[0]
        return {*CPP_LAYERS[: CPP_LAYERS.index(layer)], *CPP_ROOMS.get(name, set())}
    if top == "cpp_ext":
        return PYTHON_ROOMS[room]
    return (MAY_IMPORT[top] - {top}) | (PYTHON_ROOMS[room] - {room})


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_and_what_it_may_import(room: str) -> None:
    lines = (ROOT / room / "README.md").read_text().splitlines()
    assert len(lines) <= 30
    assert lines[0].startswith("# ")
    assert any(line.startswith("Start reading at `") for line in lines)
    (line,) = [line for line in lines if line.startswith("May import: ")]
    assert set(re.findall(r"`([^`]+)`", line)) == allowed_imports(room)


def documents() -> list[Path]:
    """ARCHITECTURE.md and the README of each room."""
    return [ROOT / "ARCHITECTURE.md", *(ROOT / room / "README.md" for room in ROOMS)]


def test_the_architecture_is_short() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 160 and not line.startswith("|")] == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_the_architecture_names_is_there(document: Path) -> None:
    text = document.read_text()
    near = document.parent
    tops = (*MAY_IMPORT, "tests", "docs")
    there = ["/" + path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*")]
    there += [f"/{path.name}" for path in ROOT.iterdir()]
    files = set(re.findall(r"`([\w./-]+\.(?:py|pyi|cc|h|proto|md|yaml|toml|txt))`", text))
    if near == ROOT:
        assert len(files) > 40
        named = [name for name in sorted(files) if not any(path.endswith(f"/{name}") for path in there)]
    else:  # a README names files of its room, or by their path from the root
        named = [name for name in sorted(files) if not (near / name).is_file() and not (ROOT / name).is_file()]
    assert named == []
    folders = {name.rstrip("/") for name in re.findall(r"`([\w./-]+/)`", text)}
    assert [name for name in sorted(folders) if not any(path.endswith(f"/{name}") for path in there)] == []
