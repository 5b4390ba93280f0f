"""Checks the arguments of ``publish`` before anything is exported or written, and names the one that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...proto.errors import InvalidArgument, NotFound, not_allowed
from ...proto.names import is_file_table
from ...proto.published.manifest import Sign
from ...proto.published.model_names import check_name
from ...proto.schema import TableSchema
from ...proto.security.security import Security


def check_session(session: Any, what: str) -> None:
    """Refuses what is no session, and a session that is closed.

    Args:
        session: the argument to check.
        what: the name of the function, which begins the text.

    Raises:
        InvalidArgument: it is no session.
        FailedPrecondition: it is closed, or is used after a fork.
    """
    from ..session.session import JobSession

    if not isinstance(session, JobSession):
        raise not_allowed(f"{what}.session: type", type(session).__name__, "a session, as sr.connect returns")
    session.core.native.check_usable()


def check_model(model: Any, example: Any, features: Any) -> None:
    """Refuses a model, its example or its features of another type than these have.

    Raises:
        InvalidArgument: the text names the argument and its type.
    """
    if (model is None) != (example is None):
        raise InvalidArgument("publish: model and example belong together: example=(arguments of model.forward)")
    if model is None:
        return
    import torch

    from ..data.feature_tensors import Features

    if not isinstance(model, torch.nn.Module):
        raise not_allowed("publish.model: type", type(model).__name__, "a torch.nn.Module")
    if features is not None and not isinstance(features, Features):
        raise not_allowed("publish.features: type", type(features).__name__, "sr.features.Features")
    if features is None and not isinstance(example, tuple | list):
        raise not_allowed("publish.example: type", type(example).__name__, "a tuple of the arguments of model.forward")


def check_names(name: Any, alias: Any) -> None:
    """Refuses names that a model or an alias cannot have.

    Raises:
        InvalidArgument: the text names the argument.
    """
    check_name("model", name)
    if alias is not None:
        check_name("alias", alias)


def checked_sign(sign: Any, security: Security, option: str = "publish.sign") -> Sign | None:
    """Returns what the signature covers besides the rest of a version.

    Args:
        sign: the argument to check.
        security: the security file of the publisher.
        option: the name of the option, which begins an error message.

    Raises:
        InvalidArgument: it has another value, or there is no signing key.
    """
    if sign is None:
        return None
    if sign != "rows":
        raise not_allowed(option, sign, "rows, null")
    if not security.signing_key:
        raise InvalidArgument(f"{option}: has no effect without a signing_key in the security file; name one there")
    return "rows"


def checked_card(card: Any) -> dict[str, Any]:
    """Returns a copy of the facts of a card.

    Raises:
        InvalidArgument: the card or a fact has a type that it cannot have; the text names the fact.
    """
    if not isinstance(card, Mapping):
        raise not_allowed("card: type", type(card).__name__, "a mapping of facts by name")
    for key, value in card.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float | bool | None.__class__):
            raise not_allowed(f"card[{key!r}]", value, "text, numbers, true, false, null")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument(f"card[{key!r}]: {value!r} is not finite")
    return dict(card)


def without_tables(schemas: Iterable[TableSchema], without: Iterable[str], namespace: str) -> tuple[TableSchema, ...]:
    """Returns the tables of a namespace that are published, which never include its files.

    Args:
        schemas: all tables of the namespace.
        without: the names of those that are not published.
        namespace: the namespace.

    Raises:
        NotFound: the namespace has no table of such a name.
    """
    there, left_out = {schema.name: schema for schema in schemas}, set(without)
    unknown = sorted(left_out.difference(there))
    if unknown:
        known = ", ".join(there) or "none"
        raise NotFound(f"without: table {unknown[0]!r} is not in namespace {namespace!r}; its tables: {known}")
    return tuple(schema for name, schema in there.items() if name not in left_out and not is_file_table(name))
