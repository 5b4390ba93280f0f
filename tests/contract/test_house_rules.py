"""The house (ARCHITECTURE.md): who may import whom, and which names the tree must not grow."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from rooms import (
    CPP_EXCEPTIONS,
    CPP_LAYERS,
    CPP_ROOMS,
    MAY_IMPORT,
    PYTHON_ROOMS,
    ROOT,
    circles_of,
    cpp_includes,
    imported_rooms,
    imports_of,
    python_files,
)


def imported_folders(path: Path) -> set[tuple[int, str]]:
    """(line, top-level folder of ours) of each import, relative or by the package's name."""
    package = path.relative_to(ROOT).parts[:-1]
    found: set[tuple[int, str]] = set()
    for node in imports_of(path):
        folders: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [*base, *(node.module.split(".") if node.module else [])]
            folders = [names[0]] if names else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sparserow":
            folders = [*node.module.split(".")[1:2]] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            folders = [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sparserow.")]
        found.update((node.lineno, folder) for folder in folders if folder in MAY_IMPORT)
    return found


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Modules that an import names, without the dots of a relative one."""
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


def is_relative(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and node.level > 0


def test_there_are_files() -> None:
    assert len(python_files()) > 400
    assert len(cpp_includes()) > 400


def test_python_imports_only_what_its_folder_may() -> None:
    wrong = []
    for path in python_files():
        name = path.relative_to(ROOT)
        allowed = MAY_IMPORT[name.parts[0]]
        wrong += [
            f"{name}:{line} imports {folder}; {name.parts[0]} may import {sorted(allowed)}"
            for line, folder in sorted(imported_folders(path))
            if folder not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_nothing_in_the_package_imports_tests() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {module}"
        for path in python_files()
        for node in imports_of(path)
        for module in modules_of(node)
        if module.split(".")[0] == "tests"
    ]
    assert not wrong, "\n".join(wrong)


def test_processes_without_torch_do_not_name_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {module}"
        for folder in ("proto", "ps_server", "serving")
        for path in sorted((ROOT / folder).rglob("*.py"))
        # It runs programs in processes of users; test_serving_loads_no_torch sees the servers' processes.
        if path.parent != ROOT / "serving" / "inference"
        for node in imports_of(path)
        for module in modules_of(node)
        if not is_relative(node) and module.split(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_of_the_core_is_in_a_layer() -> None:
    core = ROOT / "cpp_ext"
    sources = [path.relative_to(core) for path in sorted(core.rglob("*")) if path.suffix in {".cc", ".h"}]
    wrong = [f"cpp_ext/{path} is in no layer" for path in sources if path.parts[0] not in CPP_LAYERS]
    wrong += [f"cpp_ext/{layer} has no file" for layer in sorted(set(CPP_LAYERS) - {path.parts[0] for path in sources})]
    assert not wrong, "\n".join(wrong)


def test_cpp_layers_point_downwards() -> None:
    wrong = []
    for path, line, target in cpp_includes():
        layer, target_layer = path.parts[0], target.split("/")[0]
        if target_layer in CPP_LAYERS and CPP_LAYERS.index(target_layer) > CPP_LAYERS.index(layer):
            wrong.append(f"cpp_ext/{path}:{line} includes {target}")
    assert not wrong, "\n".join(wrong)


def test_cpp_rooms_of_one_layer_have_no_circle() -> None:
    named, wrong = set(), []
    for path, line, target in cpp_includes():
        room, target_room = path.parent.as_posix(), target.rpartition("/")[0]
        if target_room == room or target_room.split("/")[0] != path.parts[0]:
            continue
        if (path.as_posix(), target) in CPP_EXCEPTIONS:
            named.add((path.as_posix(), target))
        elif target_room not in (allowed := CPP_ROOMS.get(room, set())):
            wrong.append(f"cpp_ext/{path}:{line} includes {target}; {room} may include {sorted(allowed)}")
    wrong += [f"{each} is an exception that is no longer needed" for each in sorted(CPP_EXCEPTIONS - named)]
    assert not wrong, "\n".join(wrong)


def test_files_of_the_core_have_no_circle() -> None:
    arrows = {(path.as_posix(), target) for path, _, target in cpp_includes()}
    assert len(arrows) > 500
    assert circles_of({file for arrow in arrows for file in arrow}, arrows) == []


def test_python_rooms_of_one_folder_have_no_circle() -> None:
    wrong = []
    for path in python_files():
        name = path.relative_to(ROOT)
        room, top = name.parent.as_posix(), name.parts[0]
        if room == "cpp_ext":
            continue
        if top == "proto" and room not in PYTHON_ROOMS:
            wrong += [
                f"{name}:{line} imports {other}; contracts need no tool of a process"
                for line, other in sorted(imported_rooms(path))
                if other == "proto/process"
            ]
            continue
        if room not in PYTHON_ROOMS:
            wrong.append(f"{name} is in no room of PYTHON_ROOMS")
            continue
        wrong += [
            f"{name}:{line} imports {other}; {room} may import {sorted(PYTHON_ROOMS[room])}"
            for line, other in sorted(imported_rooms(path))
            if other.split("/")[0] == top and other not in {room, *PYTHON_ROOMS[room]}
        ]
    assert not wrong, "\n".join(wrong)


def test_the_device_floor_needs_nothing_of_ours() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for path in sorted((ROOT / "cpp_ext" / "device").glob("*.py"))
        for line, other in sorted(imported_rooms(path))
        if other != "cpp_ext/device"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rooms_that_may_be_imported_have_no_circle() -> None:
    circles = []
    for rooms in (CPP_ROOMS, PYTHON_ROOMS):
        left = {room: {other for other in others if other != room} for room, others in rooms.items()}
        while floor := {room for room, others in left.items() if not others & left.keys()}:
            left = {room: others for room, others in left.items() if room not in floor}
        circles += sorted(left)
    assert not circles, f"these import each other: {', '.join(circles)}"


def test_the_state_of_a_cluster_needs_no_loop_no_network_and_no_clock() -> None:
    """Times are passed in, so that a test says what time it is."""
    files = sorted((ROOT / "ps_server" / "coordinator" / "state").glob("*.py"))
    assert len(files) > 10
    wrong = []
    for path in files:
        name = path.relative_to(ROOT)
        for node in imports_of(path):
            names = [alias.name for alias in node.names] if is_relative(node) else modules_of(node)
            banned = {each.split(".")[0] for each in names} & {"asyncio", "grpc", "time", "threading"}
            wrong += [f"{name}:{node.lineno} imports {each}" for each in sorted(banned)]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today"):
                wrong.append(f"{name}:{node.lineno} asks for {node.attr}")
    assert not wrong, "\n".join(wrong)


def test_core_names_no_torch() -> None:
    sources = [path for layer in CPP_LAYERS[:-2] for path in (ROOT / "cpp_ext" / layer).rglob("*") if path.is_file()]
    assert len(sources) > 100
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in sorted(sources)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "torch/" in line
    ]
    assert not wrong, "the core must not include torch:\n" + "\n".join(wrong)


NAMESPACES = {"bindings": "sparserow::bindings", "ops": "sparserow::ops", "rpc": "sparserow::rpc"}


def test_a_namespace_is_that_of_its_layer() -> None:
    """The layers with users outside of the core have namespaces of their own; the others are `sparserow`."""
    opened = re.compile(r"^namespace (sparserow(?:::\w+)*) \{", re.MULTILINE)
    kernels = {"sparserow::SPARSEROW_ISA"}  # compiled once for each set of instructions
    wrong, found = [], set()
    for layer in CPP_LAYERS:
        for path in sorted((ROOT / "cpp_ext" / layer).rglob("*")):
            if path.suffix not in {".cc", ".h"}:
                continue
            names = set(opened.findall(path.read_text())) - kernels
            found |= names
            if names - {NAMESPACES.get(layer, "sparserow")}:
                wrong.append(f"{path.relative_to(ROOT)}: {sorted(names)}")
    assert not wrong, "\n".join(wrong)
    assert found == {"sparserow", *NAMESPACES.values()}


def test_no_file_without_a_concept() -> None:
    banned = {"utils", "util", "common", "helpers", "helper", "misc"}
    paths = [*python_files(), *sorted((ROOT / "cpp_ext").rglob("*.h"))]
    wrong = [str(path.relative_to(ROOT)) for path in paths if path.stem in banned]
    assert not wrong, "\n".join(wrong)


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


def test_a_room_says_what_it_is_and_what_it_may_import() -> None:
    wrong = []
    for room in ROOMS:
        page = ROOT / room / "README.md"
        if not page.is_file():
            wrong.append(f"{room}/README.md is not there")
            continue
        lines = page.read_text().splitlines()
        imports = [line for line in lines if line.startswith("May import: ")]
        named, allowed = set(re.findall(r"`([^`]+)`", "".join(imports))), allowed_imports(room)
        faults = {
            f"it has {len(lines)} lines; 30 are allowed": len(lines) > 30,
            "its first line is no title": not "".join(lines[:1]).startswith("# "),
            "no line says where to start reading": not any(line.startswith("Start reading at `") for line in lines),
            f"{len(imports)} lines begin with 'May import: '": len(imports) != 1,
            f"it names {sorted(named)}; allowed: {sorted(allowed)}": named != allowed,
        }
        wrong += [f"{room}/README.md: {fault}" for fault, is_so in faults.items() if is_so]
    assert not wrong, "\n".join(wrong)


def test_the_architecture_is_short() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= 150
    long = [number for number, line in enumerate(lines, 1) if len(line) > 160 and not line.startswith("|")]
    assert not long, f"lines of more than 160 characters: {long}"


@functools.cache
def ends_of_paths() -> frozenset[str]:
    """Each file and folder as the documents may write it: its path from the root, or the last parts of that."""
    paths = [path for top in (*MAY_IMPORT, "tests", "docs") for path in (ROOT / top).rglob("*")]
    parts = [path.relative_to(ROOT).parts for path in (*paths, *ROOT.iterdir())]
    return frozenset("/".join(each[begin:]) for each in parts for begin in range(len(each)))


def test_every_file_that_the_architecture_names_is_there() -> None:
    """ARCHITECTURE.md and the README of each room; these name files of their room, or by the path from the root."""
    readmes = [ROOT / room / "README.md" for room in ROOMS]
    named, wrong = set(), []
    for document in (ROOT / "ARCHITECTURE.md", *(readme for readme in readmes if readme.is_file())):
        for number, line in enumerate(document.read_text().splitlines(), 1):
            for name in re.findall(r"`([\w./-]+(?:\.(?:py|pyi|cc|h|proto|md|yaml|toml|txt)|/))`", line):
                if name.endswith("/") or document.parent == ROOT:
                    is_there = name.rstrip("/") in ends_of_paths()
                else:
                    is_there = (document.parent / name).is_file() or (ROOT / name).is_file()
                if document.parent == ROOT and not name.endswith("/"):
                    named.add(name)
                if not is_there:
                    wrong.append(f"{document.relative_to(ROOT)}:{number}: {name}")
    assert len(named) > 40
    assert not wrong, "\n".join(wrong)
