"""Checks the parts of an exported program that torch would run: operators, expressions, guards and names."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import DataLoss

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"[A-Za-z0-9_.]*")
_NAMES_OF = frozenset({"name", "arg_name", "class_fqn"})
_PATHS_OF = frozenset({"parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "fqn"})
_CODE_NAMESPACES = frozenset({"aten", "prims", "sparserow", "quantized", "quantized_decomposed", "torchvision"})
_FILE_OPERATORS = frozenset({"save", "load", "from_file"})
_HIGHER_ORDER = frozenset(
    {"cond", "while_loop", "scan", "map_impl", "associative_scan", "wrap_with_set_grad_enabled", "wrap_with_autocast"}
)
_SCALARS = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|xor|getitem)"
    r"|math\.(ceil|floor|trunc|sqrt|pow|log|log2|exp)"
    r"|torch\.(sym_float|sym_int|sym_ite|sym_max|sym_min|sym_not|sym_sum|_sym_sqrt)"
)
_FUNCTIONS = frozenset(
    {
        *("Add", "Mul", "Max", "Min", "Abs", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv"),
        *("CeilToInt", "FloorToInt"),
        *("TruncToInt", "TruncToFloat", "ToFloat", "IntTrueDiv", "FloatTrueDiv", "RoundToInt", "RoundDecimal"),
        *("PowByNatural", "FloatPow", "LShift", "RShift", "ModularIndexing", "Identity", "Where", "Piecewise"),
        *("Eq", "Ne", "Ge", "Gt", "Le", "Lt", "And", "Or", "Not", "Integer", "Float", "Rational"),
    }
)
_METHODS = frozenset({"size", "stride", "storage_offset"})
_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Name, ast.Load, ast.Tuple),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_MOST_EXPRESSION = 4096
IsOperator = Callable[[str, str, str], bool]  # whether torch.ops.NAMESPACE.NAME.OVERLOAD is an operator

_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})


def check_code(model: Any, where: str, *, is_signed: bool, is_operator: IsOperator) -> None:
    """Refuses a program that would make torch run anything but operators on tensors.

    Args:
        model: the program's JSON.
        where: the name of the program, which begins an error message.
        is_signed: whether a trusted publisher signed the program, which may then use operators of its own libraries.
        is_operator: says whether torch has an operator of a given namespace, name and overload.

    Raises:
        DataLoss: the program has something that is not allowed; the text names it.
    """
    try:
        _walk(model, "", partial(_check_operator, is_signed=is_signed, is_operator=is_operator))
        for guard in model.get("guards_code", ()):
            _check_expression(guard, is_guard=True)
        for size in model["range_constraints"]:
            _check_expression(size, is_guard=False)  # of a size that depends on another one, such as s0 + 1
    except _NotAllowed as error:
        raise DataLoss(f"{where}: {error}, which may run code; it is not allowed in a program") from None


class _NotAllowed(Exception):  # noqa: N818 - it stays in this module
    """The program has something that is not allowed."""


def _walk(value: Any, key: str, check_operator: Callable[[str], None]) -> None:
    if isinstance(value, dict):
        for name, part in value.items():
            if key == "metadata":
                continue  # torch does not run these texts
            _walk(part, name, check_operator)
    elif isinstance(value, list):
        for part in value:
            _walk(part, key, check_operator)
    elif isinstance(value, str):
        _check_text(key, value, check_operator)


def _check_text(key: str, text: str, check_operator: Callable[[str], None]) -> None:
    if key == "target":
        check_operator(text)
    elif key == "expr_str":
        _check_expression(text, is_guard=False)
    elif key in _NAMES_OF or key == "forward_arg_names":
        _check_name(text)
    elif key in _PATHS_OF and not _PATH.fullmatch(text):
        raise _NotAllowed(f"{key} {text[:80]!r} is not a name")
    elif key in ("in_spec", "out_spec"):
        _check_tree(json.loads(text)[1])


def _check_name(text: str) -> None:
    if text and not _IDENTIFIER.fullmatch(text):
        raise _NotAllowed(f"{text[:80]!r} is not a name")


def _check_operator(target: str, *, is_signed: bool, is_operator: IsOperator) -> None:
    """Refuses an operator that is not registered with torch; any other path would find a function of Python."""
    if _SCALARS.fullmatch(target):
        return
    parts = target.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) in (4, 5) and not any(part.startswith("__") for part in parts):
        if parts[2] == "higher_order" and parts[3] in _HIGHER_ORDER:
            return
        known = is_signed or (parts[2] in _CODE_NAMESPACES and parts[3] not in _FILE_OPERATORS)
        if known and len(parts) == 5 and is_operator(*parts[2:]):
            return
    hint = "" if is_signed else " in a program without a signature"
    raise _NotAllowed(f"operator {target[:80]!r}{hint}")


def _check_expression(text: str, *, is_guard: bool) -> None:
    """Refuses an expression that is anything but arithmetic on sizes."""
    if len(text) > _MOST_EXPRESSION:
        raise _NotAllowed(f"an expression of {len(text)} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError):
        raise _NotAllowed(f"expression {text[:80]!r}") from None
    symbols = {id(node) for call in ast.walk(tree) if _is_symbol(call) for node in ast.walk(call)}
    if not all(id(node) in symbols or _is_arithmetic(node, is_guard) for node in ast.walk(tree)):
        raise _NotAllowed(f"expression {text[:80]!r}")


def _is_symbol(node: ast.AST) -> bool:
    """Whether the node is ``Symbol('s0', positive=True, ...)``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Symbol"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and _IDENTIFIER.fullmatch(node.args[0].value) is not None
        and all(isinstance(word.value, ast.Constant) and type(word.value.value) is bool for word in node.keywords)
    )


def _is_arithmetic(node: ast.AST, is_guard: bool) -> bool:
    if isinstance(node, ast.Call):
        if node.keywords:
            return False
        if isinstance(node.func, ast.Name):
            return node.func.id in _FUNCTIONS
        return is_guard and isinstance(node.func, ast.Attribute)
    if isinstance(node, ast.Attribute):
        return is_guard and node.attr in _METHODS
    if isinstance(node, ast.Subscript):
        return is_guard and isinstance(node.slice, ast.Constant)
    if isinstance(node, ast.Name):
        return not node.id.startswith("__")
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) or (is_guard and isinstance(node.value, str))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return isinstance(node.right, ast.Constant) and isinstance(node.right.value, int) and node.right.value <= 64
    return isinstance(node, _NODES)


def _check_tree(tree: Any) -> None:
    """Refuses arguments other than tensors in tuples, lists and dicts, because other kinds would import modules."""
    if tree["type"] not in _TREES:
        raise _NotAllowed(f"arguments of type {str(tree['type'])[:80]!r}")
    context = None if tree["context"] is None else json.loads(tree["context"])
    if context is not None and not (isinstance(context, list) and all(isinstance(part, str | int) for part in context)):
        raise _NotAllowed(f"arguments with {str(context)[:80]!r}")
    for child in tree["children_spec"]:
        _check_tree(child)
