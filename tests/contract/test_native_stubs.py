"""The stubs of the native modules name what the modules have, with the same parameters."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import sparserow

CORE = Path(sparserow.__file__).parent / "cpp_ext"
MODULES = ("_server", "_client", "_bench")

Parameters = list[tuple[str, bool, bool]]  # name, whether it is by keyword alone, whether it has a default
ANY = ("**", True, True)  # the module takes further keywords, and checks it itself


def stub_parameters(function: ast.FunctionDef) -> Parameters:
    """Parameters without ``self``; those by position first."""
    arguments = function.args
    by_place = [*arguments.posonlyargs, *arguments.args]
    first_default = len(by_place) - len(arguments.defaults)
    found = [(each.arg, False, at >= first_default) for at, each in enumerate(by_place)]
    found += [
        (each.arg, True, default is not None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [each for each in found if each[0] not in ("self", "cls")]


def native_parameters(signature: str) -> Parameters:
    """Parameters of a line that pybind11 writes: ``name(self: T, key: int, *, found: bool = False) -> R``."""
    inside = signature[signature.index("(") + 1 : _closing(signature)]
    found, keyword_alone = [], False
    for part in _split(inside):
        if part.startswith("**"):
            return [*found, ANY]
        if part == "*":
            keyword_alone = True
        elif not part.startswith(("self:", "*", "/")):
            found.append((re.split(r"[:=]", part)[0].strip(), keyword_alone, _default_of(part)))
    return found


def _closing(signature: str) -> int:
    depth = 0
    for at, letter in enumerate(signature):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and letter == ")":
            return at
    raise AssertionError(f"no end of the parameters in {signature!r}")


def _split(inside: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(inside):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(inside[begin:at].strip())
            begin = at + 1
    return [part for part in (*parts, inside[begin:].strip()) if part]


def _default_of(part: str) -> bool:
    depth = 0
    for letter in part:
        depth += {"(": 1, "[": 1, "<": 1, ")": -1, "]": -1, ">": -1}.get(letter, 0)
        if letter == "=" and depth == 0:
            return True
    return False


def signatures(function: Any) -> list[Parameters]:
    """Of each overload."""
    lines = (function.__doc__ or "").splitlines()
    if not lines:
        return []
    if lines[0].endswith("(*args, **kwargs)"):
        name = function.__name__
        return [native_parameters(line[3:]) for line in lines if re.match(rf"\d+\. {re.escape(name)}\(", line)]
    return [native_parameters(lines[0])]


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def differences(stub: list[ast.stmt], native: Any, place: str) -> list[str]:
    """What differs between the statements of a stub and the module, or class, that they describe."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    classes: dict[str, ast.ClassDef] = {}
    values: set[str] = set()
    for statement in stub:
        if isinstance(statement, ast.FunctionDef):
            functions.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, ast.ClassDef):
            classes[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            values.add(statement.target.id)
    named = {*functions, *classes, *values}
    has = public(vars(native))
    wrong = [f"{place}.{name} is not in the stub" for name in sorted(has - named)]
    wrong += [f"{place}.{name} is in the stub alone" for name in sorted(public(named) - has)]
    for name, overloads in functions.items():
        made = getattr(native, name, None)
        if made is None or isinstance(made, property) or (name.startswith("_") and name != "__init__"):
            continue
        said, is_so = [stub_parameters(each) for each in overloads], signatures(made)
        if name == "__init__" and not is_so:
            continue
        if is_so and ANY in is_so[0]:
            said = [[*(each for each in said[0] if each in is_so[0]), ANY]]
        if sorted(said) != sorted(is_so):
            wrong.append(f"{place}.{name}: the stub has {said}, the module {is_so}")
    for name, statement in classes.items():
        if name in has:
            wrong += differences(statement.body, getattr(native, name), f"{place}.{name}")
    return wrong


@pytest.mark.parametrize("name", MODULES)
def test_stub_and_module_agree(name: str) -> None:
    native = importlib.import_module(f"sparserow.cpp_ext.{name}")
    stub = ast.parse((CORE / f"{name}.pyi").read_text())
    assert differences(stub.body, native, name) == []


def test_what_differs_is_named() -> None:
    native = importlib.import_module("sparserow.cpp_ext._server")
    stub = (
        "def slot_of(hash: int) -> int: ...\ndef invented() -> None: ...\nclass Store:\n    def pull(self, keys): ...\n"
    )
    found = "\n".join(differences(ast.parse(stub).body, native, "_server"))
    assert "_server.invented is in the stub alone" in found
    assert "_server.Server is not in the stub" in found
    assert "_server.Store.pull: the stub has [[('keys', False, False)]]" in found
    assert "_server.slot_of: " in found
