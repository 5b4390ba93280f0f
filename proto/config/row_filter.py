"""The grammar of ``data.where``: which rows of the files a job reads.

    where      := test | not where | where and where | where or where | (where)
    test       := value (== | != | < | <= | > | >=) value | column [not] in [literal, ...] | column is [not] None
    value      := column | literal
    column     := a name, or column("any name")
    literal    := a number, a quoted text, True or False

It is a part of Python's grammar, which Python's own parser reads; nothing is evaluated here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import InvalidArgument

_ALLOWED = "allowed: comparisons of columns with numbers and texts, in, not in, is None, and, or, not"
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_MOST_CHARACTERS = 10_000

Scalar: TypeAlias = "int | float | str | bool"


@dataclass(frozen=True)
class Column:
    """A column by its name."""

    name: str


@dataclass(frozen=True)
class Comparison:
    """``left OPERATOR right``; the operator is one of == != < <= > >=."""

    left: Column | Scalar
    operator: str
    right: Column | Scalar


@dataclass(frozen=True)
class OneOf:
    """Whether a column has one of several values."""

    column: Column
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class Absence:
    """Whether a column is null."""

    column: Column


@dataclass(frozen=True)
class Not:
    """The negation of a predicate; it is null, and selects no row, where the predicate is."""

    of: Predicate


@dataclass(frozen=True)
class Both:
    """Two predicates or more, joined by ``and`` or ``or``."""

    word: Literal["and", "or"]
    parts: tuple[Predicate, ...]


Predicate: TypeAlias = "Comparison | OneOf | Absence | Not | Both"


def parse_where(text: str) -> Predicate:
    """Returns the predicate that a text means.

    Raises:
        InvalidArgument: the text is none.
    """
    if len(text) > _MOST_CHARACTERS:
        raise InvalidArgument(f"where: it has {len(text)} characters; allowed: at most {_MOST_CHARACTERS}")
    try:
        return _predicate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"where: {text!r} cannot be read; {_ALLOWED}") from error


def columns_of(predicate: Predicate) -> tuple[str, ...]:
    """Returns the names of the columns that a predicate reads, sorted."""
    names: set[str] = set()
    left: list[Predicate] = [predicate]
    while left:
        each = left.pop()
        if isinstance(each, Both):
            left.extend(each.parts)
        elif isinstance(each, Not):
            left.append(each.of)
        elif isinstance(each, Comparison):
            names.update(side.name for side in (each.left, each.right) if isinstance(side, Column))
        else:
            names.add(each.column.name)
    return tuple(sorted(names))


def _predicate(node: ast.expr) -> Predicate:
    if isinstance(node, ast.BoolOp):
        word: Literal["and", "or"] = "and" if isinstance(node.op, ast.And) else "or"
        return Both(word, tuple(_predicate(each) for each in node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return Not(_predicate(node.operand))
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        tests = [_test(*each) for each in zip(sides, node.ops, sides[1:], strict=False)]
        return tests[0] if len(tests) == 1 else Both("and", tuple(tests))
    raise _refused(node)


def _test(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Predicate:
    test: Predicate
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise _refused(right)
        values = tuple(_value(each) for each in right.elts)
        plain = tuple(value for value in values if not isinstance(value, Column))
        if len(plain) != len(values):
            raise _refused(right)
        test = OneOf(_column(left), plain)
        return Not(test) if isinstance(operator, ast.NotIn) else test
    if isinstance(operator, ast.Is | ast.IsNot):
        if not isinstance(right, ast.Constant) or right.value is not None:
            raise _refused(right)
        test = Absence(_column(left))
        return Not(test) if isinstance(operator, ast.IsNot) else test
    sides = _value(left), _value(right)
    if not any(isinstance(side, Column) for side in sides):
        raise _refused(left)
    return Comparison(sides[0], _COMPARISONS[type(operator)], sides[1])


def _column(node: ast.expr) -> Column:
    value = _value(node)
    if not isinstance(value, Column):
        raise _refused(node)
    return value


def _value(node: ast.expr) -> Column | Scalar:
    if isinstance(node, ast.Name):
        return Column(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        negated = _value(node.operand)
        if isinstance(negated, int | float):
            return -negated
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "column"
        and len(node.args) == 1
        and not node.keywords
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ):
        return Column(node.args[0].value)
    raise _refused(node)


def _refused(node: ast.expr) -> InvalidArgument:
    return InvalidArgument(f"where: {ast.unparse(node)!r} is not allowed there; {_ALLOWED}")
