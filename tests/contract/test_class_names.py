"""A class has a name of its own: a reader who meets it in another file knows which one it is."""

from __future__ import annotations

import ast
import re
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


DEFINED = re.compile(
    r"^(?:struct|class) (?:SR_\w+(?:\([^)]*\))? )?(?:\[\[\w+\]\] )?(?:alignas\(\w+\) )?(\w+)(?: final)?(?: : .*)? \{"
)


def test_no_two_files_of_the_core_define_a_type_of_one_name() -> None:
    """One of two types of a name would be destroyed as the other: the linker keeps one function of each name."""
    places: dict[str, set[str]] = defaultdict(set)
    files = [path for path in (ROOT / "cpp_ext").rglob("*") if path.suffix in (".h", ".cc")]
    assert len(files) > 200
    for path in files:
        open_namespaces: list[str] = []
        for line in path.read_text().splitlines():
            if begun := re.match(r"namespace ([\w:]*) ?\{", line):
                open_namespaces.append(begun[1] or "unnamed")
            elif line.startswith("}  // namespace") and open_namespaces:
                open_namespaces.pop()
            elif (found := DEFINED.match(line)) and "unnamed" not in open_namespaces:
                places["::".join([*open_namespaces, found[1]])].add(path.relative_to(ROOT).as_posix())
    assert len(places) > 150
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared, "\n".join(f"{name}: {', '.join(sorted(files))}" for name, files in sorted(shared.items()))
