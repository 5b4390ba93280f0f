"""docs/versioning.md has the numbers of all formats as the code has them, and deprecations name a version."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooms import ROOT, python_files

PAGE = ROOT / "docs" / "versioning.md"
# A constant that is the number of a format.
CPP_NUMBER = re.compile(r"\b(k\w*Format|k\w*Version|kProtocolMin)\s*=\s*\d+;")
PYTHON_NUMBER = re.compile(r"(?:_?[A-Z]+_)?_?FORMATS?|\w*_STATE_VERSION")
NO_FORMATS = {"deploy/bench/suite.py"}  # results of a benchmark, which only its own run reads
Constant = tuple[str, str]  # file, name


def python_constants(text: str) -> dict[str, list[int]]:
    """The constants of a module that are numbers of formats, with their numbers."""
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        pairs = (
            list(zip(target.elts, node.value.elts, strict=True))
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            else [(target, node.value)]
        )
        for name, value in pairs:
            if isinstance(name, ast.Name) and PYTHON_NUMBER.fullmatch(name.id):
                numbers = value.keys if isinstance(value, ast.Dict) else [value]
                literals = [each.value for each in numbers if isinstance(each, ast.Constant)]
                if literals and all(str(each).isdigit() for each in literals):
                    found[name.id] = [int(each) for each in literals]
    return found


def cpp_constants(text: str) -> dict[str, list[int]]:
    """The constants of a C++ file that are numbers of formats, and what its function ``format_of`` returns."""
    found = {match[1]: [int(re.findall(r"\d+", match[0])[-1])] for match in CPP_NUMBER.finditer(text)}
    chooses = re.search(r"\bformat_of\(.*return (.*?);", text)
    return found | ({"format_of": [int(each) for each in re.findall(r"\b\d+\b", chooses[1])]} if chooses else {})


def numbers_of_code() -> dict[Constant, list[int]]:
    files = [*python_files(), *(ROOT / "cpp_ext").rglob("*.h"), *(ROOT / "cpp_ext").rglob("*.cc")]
    found = {}
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if name not in NO_FORMATS:
            constants = python_constants if path.suffix == ".py" else cpp_constants
            found |= {(name, constant): numbers for constant, numbers in constants(path.read_text()).items()}
    return found


def rows_of_page() -> Iterator[tuple[str, list[int], list[Constant]]]:
    """What, its numbers, and the constants that have them."""
    for line in PAGE.read_text().partition("## Formats")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 3 and re.match(r"\d", cells[1]):
            places = re.findall(r"`([\w/.]+)` `(\w+)`", cells[2])
            yield cells[0], [int(each) for each in cells[1].split(", ")], places


def test_the_numbers_are_those_of_the_code() -> None:
    code, wrong, count = numbers_of_code(), [], 0
    for what, numbers, places in rows_of_page():
        count += 1
        found = [code.get(place) for place in places]
        is_one_each = [number for each in found for number in each or ()] == numbers
        if not is_one_each and not (found and all(each == numbers for each in found)):
            wrong.append(f"{what}: the page has {numbers}, the code {dict(zip(places, found, strict=True))}")
    assert count > 12
    assert not wrong, "\n".join(wrong)


def test_no_format_is_missing() -> None:
    listed = {place for *_, places in rows_of_page() for place in places}
    assert numbers_of_code().keys() - listed == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FORMAT = 3", {"FORMAT": [3]}),
        ('FORMAT, SHARED_FORMAT = "1", "2"', {"FORMAT": [1], "SHARED_FORMAT": [2]}),
        ('FORMATS = {1: "a", 2: "b"}', {"FORMATS": [1, 2]}),
        ("_STATE_VERSION = 3", {"_STATE_VERSION": [3]}),
        ('FORMAT_KEY = "sparserow.format"\nFORMAT = "sparserow bench 1"', {}),
    ],
)
def test_numbers_are_found_in_python(text: str, expected: dict[str, list[int]]) -> None:
    assert python_constants(text) == expected


def test_numbers_are_found_in_cpp() -> None:
    text = (
        "static constexpr std::uint16_t kFormat = 7;\nint format_of(Kind kind) noexcept { return kind == kA ? 1 : 2; }"
    )
    assert cpp_constants(text) == {"kFormat": [7], "format_of": [1, 2]}


def unnamed_removals(path: Path, text: str) -> list[str]:
    """The warnings of a deprecation in a module that do not say in which version something is removed."""
    return [
        f"{path.name}:{node.lineno} warns of a deprecation without `removed in VERSION`"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and "DeprecationWarning" in (said := ast.unparse(node))
        if not re.search(r"removed in \d+\.\d+", said)
    ]


def test_a_deprecation_names_the_version_of_the_removal() -> None:
    wrong = [each for path in python_files() for each in unnamed_removals(path, path.read_text())]
    assert not wrong, "\n".join(wrong)
    call = 'warnings.warn("lookup is named gather{}", DeprecationWarning, stacklevel=2)'
    assert unnamed_removals(PAGE, call.format(""))
    assert not unnamed_removals(PAGE, call.format(", and removed in 0.4"))
