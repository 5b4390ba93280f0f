"""The rooms of the house: which there are, which may import which, and how many arrows run between them.

``python tests/support/rooms.py [FOLDER ...]`` prints rooms, floors and arrows of each folder.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

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
    "store/ssd/pages": {"store/ssd"},
    "store": {"store/table", "store/ssd", "store/ssd/pages"},
    "store/changes": {"store", "store/table"},
}
# A store creates its log of changes, which reads the store's own maps.
CPP_EXCEPTIONS = {("store/store.cc", "store/changes/change_log.h")}
# A room of Python may import its own files, other top-level folders as MAY_IMPORT says, and these rooms of its folder.
SESSION = {"worker/membership", "worker/session"}
LOOKUPS = {"worker/lookups", "worker/lookups/makers"}
VERBS = {f"worker/{room}" for room in ("checkpoint", "layers", "prefetch", "publish", "row_files")}
LOCAL = {"deploy/launch", "deploy/train"}
PYTHON_ROOMS = {
    "cpp_ext/device": set(),
    "proto/options": {"proto"},
    "proto/features": {"proto", "proto/options"},
    "proto/checkpoint": {"proto"},
    "proto/config": {"proto", "proto/checkpoint", "proto/features", "proto/options"},
    "proto/status": {"proto"},
    "proto/process": {"proto", "proto/config", "proto/security"},
    "worker": set(),
    "worker/membership": set(),
    "worker/metrics": set(),
    "worker/models": set(),
    "worker/data": {"worker/metrics"},
    "worker/data/sources": {"worker/data"},
    "worker/session": SESSION,
    "worker/device_tables": SESSION,
    "worker/lookups": {*SESSION, "worker/data"},
    "worker/lookups/makers": {*SESSION, "worker/data", "worker/device_tables", "worker/lookups"},
    "worker/layers": {*SESSION, *LOOKUPS, "worker/data", "worker/device_tables"},
    "worker/prefetch": {*SESSION, "worker/data", "worker/lookups"},
    "worker/row_files": SESSION,
    "worker/checkpoint": {*SESSION, "worker/layers", "worker/device_tables"},
    "worker/publish": {*SESSION, *LOOKUPS, "worker/layers", "worker/checkpoint", "worker/data"},
    "worker/gateway": SESSION,
    "worker/api": {*SESSION, *VERBS, "worker/data", "worker/data/sources"},
    "worker/training": {
        *SESSION,
        *LOOKUPS,
        *VERBS,
        *("worker/api", "worker/data", "worker/data/sources", "worker/metrics", "worker/models"),
    },
    "serving/client": set(),
    "serving/inference": {"serving/client"},
    "serving": {"serving/client"},
    "ps_server": set(),
    "ps_server/shard": set(),
    "ps_server/coordinator/state": set(),
    "ps_server/coordinator/storage": set(),
    "ps_server/coordinator/procedures": {"ps_server/coordinator/state"},
    "ps_server/coordinator/page": set(),
    "ps_server/coordinator": {f"ps_server/coordinator/{room}" for room in ("page", "state", "storage", "procedures")},
    "deploy": {"deploy/preflight"},  # what --version prints
    "deploy/package": set(),
    "deploy/launch": set(),
    "deploy/observe": set(),
    "deploy/preflight": set(),
    "deploy/examples": {"deploy/launch"},
    "deploy/train": {"deploy/launch", "deploy/preflight"},
    "deploy/ray": {*LOCAL, "deploy/preflight"},
    "deploy/bench/peers": set(),
    "deploy/bench": {*LOCAL, "deploy/bench/peers"},
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


@functools.cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a module, which is parsed once, because many rules ask for them."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


@functools.cache
def cpp_includes() -> list[tuple[Path, int, str]]:
    """(file, line, what it includes) of the layers; files are relative to cpp_ext."""
    return [
        (path.relative_to(ROOT / "cpp_ext"), number, line.split('"')[1])
        for layer in CPP_LAYERS
        for path in sorted((ROOT / "cpp_ext" / layer).rglob("*"))
        if path.suffix in {".cc", ".h"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith('#include "')
    ]


def line_of(text: str, place: int) -> int:
    """The number of the line in which a place of a text lies, from 1."""
    return text.count("\n", 0, place) + 1


def imported_rooms(path: Path) -> set[tuple[int, str]]:
    """(line, folder of ours, relative to the root) of each name that a file imports relatively."""
    package = path.relative_to(ROOT).parts[:-1]
    found: set[tuple[int, str]] = set()
    for node in imports_of(path):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else []))
        for alias in node.names:
            parts = (*base, alias.name)
            while parts and not ROOT.joinpath(*parts).is_dir():
                parts = parts[:-1]
            found.add((node.lineno, "/".join(parts)))
    return found


def room_of(folder: str, path: str) -> str:
    """The room of ``folder`` in which a file or a folder lies: a sub-folder, or the file without its suffix."""
    return path.removeprefix(folder + "/").split("/")[0].split(".")[0]


def arrows_of(folder: str) -> tuple[set[str], set[tuple[str, str]]]:
    """(rooms, arrows) of a folder: its files and sub-folders, and (who imports, what is imported) between them."""
    rooms = {
        path.stem if path.is_file() else path.name
        for path in (ROOT / folder).iterdir()
        if path.suffix in {".py", ".cc", ".h"} or (path.is_dir() and any(path.rglob("*.[pch]*")))
    } - {"__init__", "__pycache__"}
    arrows: set[tuple[str, str]] = set()
    if folder.startswith("cpp_ext"):
        pairs = [(f"cpp_ext/{path.as_posix()}", f"cpp_ext/{target}") for path, _, target in cpp_includes()]
    else:
        pairs = [
            (path.relative_to(ROOT).as_posix(), target) for path in python_files() for target in imported_modules(path)
        ]
    for source, target in pairs:
        if source.startswith(folder + "/") and target.startswith(folder + "/"):
            ends = [
                room_of(folder, end).removesuffix(".py").removesuffix(".cc").removesuffix(".h")
                for end in (source, target)
            ]
            if ends[0] != ends[1] and set(ends) <= rooms:
                arrows.add((ends[0], ends[1]))
    return rooms, arrows


def imported_modules(path: Path) -> set[str]:
    """Modules of ours, as paths without suffix, that a file imports relatively."""
    package = path.relative_to(ROOT).parts[:-1]
    found: set[str] = set()
    for node in imports_of(path):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else []))
        for alias in node.names:
            parts = (*base, alias.name)
            while parts and not (ROOT.joinpath(*parts).is_dir() or ROOT.joinpath(*parts).with_suffix(".py").is_file()):
                parts = parts[:-1]
            found.add("/".join(parts))
    return found


def circles_of(rooms: set[str], arrows: set[tuple[str, str]]) -> list[set[str]]:
    """The circles of imports: rooms of which each reaches each other one."""
    after = {room: {target for source, target in arrows if source == room} for room in rooms}
    reached = {room: _reached_from(room, after) for room in rooms}
    together = {frozenset(other for other in reached[room] if room in reached[other]) for room in rooms}
    return [set(circle) for circle in sorted(together, key=sorted) if len(circle) > 1]


def _reached_from(room: str, after: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = set(after[room])
    while left:
        found |= left
        left = set().union(*(after[each] for each in left)) - found
    return found


def floors_of(rooms: set[str], arrows: set[tuple[str, str]]) -> int:
    """The longest chain of imports, in rooms; a circle counts as one."""
    circles = circles_of(rooms, arrows)
    whole = {room: "+".join(sorted(circle)) for circle in circles for room in circle}
    left = {whole.get(room, room) for room in rooms}
    between = {(whole.get(source, source), whole.get(target, target)) for source, target in arrows}
    floors = 0
    while left:
        left -= {room for room in left if not any(s == room and t != room and t in left for s, t in between)}
        floors += 1
    return floors


if __name__ == "__main__":
    for name in sys.argv[1:] or [
        "cpp_ext/rpc",
        "cpp_ext/store",
        "worker",
        "deploy",
        "ps_server/coordinator",
        "serving",
    ]:
        rooms, arrows = arrows_of(name)
        print(f"{name:24} {len(rooms):3} rooms {floors_of(rooms, arrows):3} floors {len(arrows):4} arrows")
        for circle in circles_of(rooms, arrows):
            print(f"{'':24} circle: {', '.join(sorted(circle))}")
