"""How a YAML file plus ``--set a.b=c`` becomes a strict model.

An unknown key, a wrong type or a value out of range raises InvalidArgument.
Its text is one line with the dotted key, the value and what is allowed. No value is clipped or ignored.
Values come from the file and the assignments; no environment variable sets a value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..errors import InvalidArgument, not_allowed
from .allowed import allowed_of_field, field_at, keys_of, tag_values

Model = TypeVar("Model", bound=BaseModel)

# Bounds on a document, counted after its aliases were written out.
_MOST_BYTES = 4 << 20
_MOST_VALUES = 200_000
_MOST_DEPTH = 50


class _Yaml(yaml.SafeLoader):
    """A YAML loader with YAML 1.2's core scalars, which refuses repeated keys.

    ``no`` and ``on`` are strings, and ``1e-3`` is a number.
    """


_Yaml.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if not tag.endswith((":bool", ":float", ":timestamp"))]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)


def _construct_mapping(loader: _Yaml, node: yaml.MappingNode) -> dict[Hashable, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key: Any = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise not_allowed(f"line {key_node.start_mark.line + 1}: key", key, "text")
        if key in mapping:
            raise InvalidArgument(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Yaml.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _parse_yaml(text: str, where: str) -> Any:
    loader = _Yaml(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except RecursionError:
        raise InvalidArgument(f"{where}: is nested too deep; allowed: {_MOST_DEPTH} levels") from None
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None
    finally:
        loader.dispose()


def _check_size(document: yaml.Node) -> None:
    """Refuses a document that is too large or too deep once its aliases are written out; it visits each node once."""
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    open_nodes: set[int] = set()
    stack = [(document, False)]
    while stack:
        node, is_left = stack.pop()
        children = _children(node)
        if is_left:
            open_nodes.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
            depths[id(node)] = 1 + max((depths[id(child)] for child in children), default=0)
            if sizes[id(node)] > _MOST_VALUES:
                raise InvalidArgument(f"it has more than {_MOST_VALUES} values with its aliases; that many are allowed")
            if depths[id(node)] > _MOST_DEPTH:
                raise InvalidArgument(f"it is nested too deep; allowed: {_MOST_DEPTH} levels")
        elif id(node) in open_nodes:
            raise InvalidArgument(f"line {node.start_mark.line + 1}: an alias stands within what it names")
        elif id(node) not in sizes:
            open_nodes.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in children)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _override(tree: dict[str, Any], assignment: str) -> None:
    """Applies one assignment ``a.b=c`` to ``tree``; a number in the path is an index of a sequence."""
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise not_allowed("--set", assignment, "KEY.KEY=VALUE")
    node: Any = tree
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        place: Any = key
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                raise not_allowed(f"--set {path}", key, f"an index below {len(node)}")
            place = int(key)
        elif not isinstance(node, dict):
            raise InvalidArgument(f"--set {path}: {'.'.join(keys[:depth])} is a single value and has no key {key!r}")
        if last:
            node[place] = _parse_yaml(text, f"--set {path}")
        else:
            if isinstance(node, dict) and node.get(place) is None:
                node[place] = {}
            node = node[place]


def load_config(model: type[Model], path: str | Path | None = None, overrides: Sequence[str] = ()) -> Model:
    """Returns a validated ``model`` of a YAML file and ``a.b=c`` assignments, which are applied in order.

    Args:
        model: a subclass of :class:`StrictModel`.
        path: the YAML file; None starts from an empty document.
        overrides: assignments whose values are YAML, such as ``data.columns=[a,b]``.

    Raises:
        InvalidArgument: the document is not allowed; the text is one line with file, key, value and what is allowed.
    """
    tree: Any = {}
    path = None if path is None else Path(path)
    if path is not None:
        try:
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise InvalidArgument(f"{path}: the file is too large; allowed: at most {_MOST_BYTES} bytes")
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path}: cannot be read: {error}") from None
        tree = _parse_yaml(text, str(path))
        tree = {} if tree is None else tree
        if not isinstance(tree, dict):
            raise InvalidArgument(f"{path}: the document is a {type(tree).__name__}; allowed: a mapping of keys")
    for assignment in overrides:
        _override(tree, assignment)
    return validate(model, tree, where=str(path) if path is not None else "")


def validate(model: type[Model], tree: dict[str, Any], *, where: str = "") -> Model:
    """Returns a validated ``model`` of plain values.

    Args:
        model: a subclass of :class:`StrictModel`.
        tree: the document as parsed YAML.
        where: the text that begins an error message, such as a file name; empty for none.

    Raises:
        InvalidArgument: the values are not allowed, as for :func:`load_config`.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        details = error.errors()
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        prefix = f"{where}: " if where else ""
        raise InvalidArgument(f"{prefix}{describe_error(model, details[0])}{more}") from None


def describe_error(model: type[BaseModel], detail: ErrorDetails) -> str:
    """Returns one line for one of pydantic's errors: the dotted key, the value and what is allowed."""
    location, found = field_at(model, detail["loc"], unknown_key=detail["type"] == "extra_forbidden")
    dotted = ".".join(map(str, location)) or "the document"
    value = detail["input"]
    if detail["type"] == "extra_forbidden":
        known = list(keys_of(found.owner)) if found.owner is not None else []
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
        return f"{dotted}: unknown key{hint}"
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        key = str(detail["ctx"]["discriminator"]).strip("'")
        tags = ", ".join(sorted(tag_values(found.field, key)))
        found_tag = f"{detail['ctx']['tag']!r} is not allowed" if "tag" in detail["ctx"] else "is missing"
        return f"{dotted}.{key}: {found_tag}; allowed: {tags}"
    if detail["type"] == "missing":
        return f"{dotted}: is missing; allowed: {allowed_of_field(found.field)}"
    message = detail["msg"].removeprefix("Value error, ")
    is_section = found.field is None or isinstance(value, dict)
    if detail["type"] == "value_error" and (is_section or "allowed" not in message):
        return f"{dotted}: {message}"  # a validator of the section raised it, with a text of its own
    return f"{dotted}: {value!r} is not allowed; allowed: {allowed_of_field(found.field)}"
