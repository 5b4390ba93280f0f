"""Describes in words which values a configuration field allows, for error messages and the reference page."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True)
class Found:
    """A place in a document.

    Attributes:
        owner: the section that holds the last key; None when the key belongs to no section.
        field: the field of the last key; None when the section does not know the key.
    """

    owner: type[BaseModel] | None
    field: FieldInfo | None


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Returns the models that an annotation can hold, found through unions, containers and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(model for part in get_args(annotation) for model in sections_of(part))


def _holds_dict(annotation: Any) -> bool:
    return get_origin(annotation) is dict or any(_holds_dict(part) for part in get_args(annotation))


def _branch_names(section: type[BaseModel]) -> set[str]:
    """Returns the names by which pydantic's error locations call this section when it is a branch of a union."""
    return {section.__name__}.union(*(_tags(field) for field in section.model_fields.values()))


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the fields of a section by the keys of a document."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def field_of(section: type[BaseModel], key: str) -> FieldInfo | None:
    """Returns the field of a key; None when the section does not know the key."""
    return keys_of(section).get(key)


def tag_values(field: FieldInfo | None, key: str) -> set[str]:
    """Returns the values of ``key`` that choose between the sections of a field."""
    sections = sections_of(field.annotation) if field is not None else ()
    return {tag for section in sections if key in section.model_fields for tag in _tags(section.model_fields[key])}


def _tags(field: FieldInfo) -> set[str]:
    return {tag for tag in get_args(field.annotation) if isinstance(tag, str)}


def field_at(
    model: type[BaseModel], location: tuple[int | str, ...], *, unknown_key: bool
) -> tuple[tuple[int | str, ...], Found]:
    """Translates a pydantic error location into the path that the user wrote.

    Args:
        model: the root of the document.
        location: pydantic's location; its names for branches of unions do not appear in the returned path.
        unknown_key: whether the last part is a key that no section knows.

    Returns:
        The user's path, and the section and field at that path.
    """
    holder: type[BaseModel] | None = None
    owner: type[BaseModel] | None = model
    field: FieldInfo | None = None
    branches: tuple[type[BaseModel], ...] = ()
    free_key = False  # whether the next part is a key that the user chose, in a mapping
    path: list[int | str] = []
    for depth, part in enumerate(location):
        if free_key or isinstance(part, int):
            path.append(part)
            free_key = False
        elif owner is not None and (found := field_of(owner, part)) is not None:
            path.append(part)
            holder, field = owner, found
            branches = sections_of(field.annotation)
            owner = branches[0] if len(branches) == 1 else None
            free_key = _holds_dict(field.annotation)
        elif unknown_key and depth == len(location) - 1:
            path.append(part)
            return tuple(path), Found(owner, None)
        else:
            owner = next((branch for branch in branches if part in _branch_names(branch)), owner)
    return tuple(path), Found(holder, field)


def _bounds(metadata: Iterable[Any]) -> str:
    words = []
    for bound in metadata:
        for kind, sign in (
            (annotated_types.Ge, ">="),
            (annotated_types.Gt, ">"),
            (annotated_types.Le, "<="),
            (annotated_types.Lt, "<"),
        ):
            if isinstance(bound, kind):
                words.append(f"{sign} {getattr(bound, kind.__name__.lower())}")
        if isinstance(bound, annotated_types.MinLen) and bound.min_length > 0:
            words.append(f"at least {bound.min_length} long")
        if isinstance(bound, annotated_types.MaxLen):
            words.append(f"at most {bound.max_length} long")
    return "" if not words else " " + " and ".join(words)


def _with_bounds(said: str, metadata: Iterable[Any]) -> str:
    bounds = _bounds(metadata)
    return f"{said};{bounds}" if bounds else said


def _said(extra: Any) -> str | None:
    return str(extra["allowed"]) if isinstance(extra, dict) and "allowed" in extra else None


def allowed_of(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Describes the values that a type allows.

    Args:
        annotation: the type.
        metadata: pydantic's constraints on the value, such as ``annotated_types.Ge``.
    """
    metadata = tuple(metadata)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        for extra in extras:
            if isinstance(extra, FieldInfo):
                said = _said(extra.json_schema_extra)
                if said is not None:
                    return _with_bounds(said, (*extra.metadata, *metadata))
                metadata = (*metadata, *extra.metadata)
            else:
                metadata = (*metadata, extra)
        return allowed_of(inner, metadata)
    if origin is Literal:
        return ", ".join("null" if choice is None else str(choice) for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = [allowed_of(part, metadata if part is not type(None) else ()) for part in get_args(annotation)]
        return " or ".join(parts)
    if origin in (tuple, list, set, frozenset):
        return f"a sequence of: {allowed_of(get_args(annotation)[0])}" + _bounds(metadata)
    if origin is dict:
        return f"a mapping of names to: {allowed_of(get_args(annotation)[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section of " + ", ".join(keys_of(annotation))
    return _TYPE_WORDS.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def allowed_of_field(field: FieldInfo | None) -> str:
    """Describes the values that a field allows; None stands for a document's root, which is a mapping."""
    if field is None:
        return "a mapping of keys"
    said = _said(field.json_schema_extra)
    if said is not None:
        ends = ", or null" if type(None) in get_args(field.annotation) else ""
        return _with_bounds(said, field.metadata) + ends
    return allowed_of(field.annotation, field.metadata)
