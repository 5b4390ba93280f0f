"""A class has a name of its own: a reader who meets it in another file knows which one it is."""

from __future__ import annotations

import ast
from collections import defaultdict

from rooms import ROOT, python_files


def test_no_two_files_have_a_public_class_of_one_name() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path.relative_to(ROOT).as_posix())
    shared = {name: files for name, files in places.items() if len(files) > 1}
    if all(place.startswith("deploy/bench/") for place in shared.get("Size", ())):
        shared.pop("Size", None)  # each benchmark's own, which no other file imports
    assert not shared, "\n".join(f"{name}: {', '.join(sorted(files))}" for name, files in sorted(shared.items()))
