"""A class has a name of its own: a reader who meets it in another file knows which one it is."""

from __future__ import annotations

import ast
from collections import defaultdict

from rooms import ROOT

ROOMS = ("proto", "cpp_ext", "ps_server", "worker", "serving", "deploy")


def test_no_two_files_have_a_public_class_of_one_name() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue  # their names are those of the messages and services
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].add(path.relative_to(ROOT).as_posix())
    shared = {name: files for name, files in places.items() if len(files) > 1}
    benches = shared.pop("Size", set())  # each benchmark's own, which no other file imports
    assert all(place.startswith("deploy/bench/") for place in benches)
    assert not shared
