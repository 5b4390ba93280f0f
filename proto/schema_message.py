"""Converts table schemas to messages of the control plane and back; a malformed message raises InvalidArgument."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import control_pb2 as pb
from .errors import InvalidArgument, not_allowed
from .optim import OPTIMIZERS
from .schema import (
    DTYPES,
    EVICT_BY,
    Constant,
    Init,
    Normal,
    RowPolicy,
    TableSchema,
    Uniform,
    XavierNormal,
    XavierUniform,
)

# Maps a oneof field to a class. The fields of a message and of its class have the same names.
_INITS: dict[str, type[Init]] = {
    "constant": Constant,
    "uniform": Uniform,
    "normal": Normal,
    "xavier_uniform": XavierUniform,
    "xavier_normal": XavierNormal,
}


def _fill(message: Any, value: Any) -> None:
    """Sets every field, but one that is optional is left out at its default: older programs do not know it."""
    defaults = {part.name: part.default for part in dataclasses.fields(value)}
    for descriptor in message.DESCRIPTOR.fields:
        given = getattr(value, descriptor.name)
        if isinstance(given, tuple):
            getattr(message, descriptor.name).extend(given)
        elif not descriptor.has_presence or given != defaults[descriptor.name]:
            setattr(message, descriptor.name, given)


def _set_kind(message: Any, kinds: Mapping[str, Any], value: Any) -> None:
    name = next(name for name, kind in kinds.items() if type(value) is kind)
    inner = getattr(message, name)
    inner.SetInParent()  # without this, a message of zeros would leave the oneof unset
    _fill(inner, value)


def _kind_of(message: Any, kinds: Mapping[str, Any], field: str) -> Any:
    name = message.WhichOneof("kind")
    if name is None:
        raise InvalidArgument(f"TableSchema.{field}: is missing; allowed: {', '.join(kinds)}")
    inner = getattr(message, name)
    given = [d.name for d in inner.DESCRIPTOR.fields if not d.has_presence or inner.HasField(d.name)]
    values = {each: getattr(inner, each) for each in given}
    return kinds[name](
        **{each: value if isinstance(value, float | bool | int) else tuple(value) for each, value in values.items()}
    )


def message_of_schema(schema: TableSchema) -> pb.TableSchema:
    """Returns the ``control_pb2.TableSchema`` of a schema."""
    message = pb.TableSchema(
        namespace=schema.namespace,
        name=schema.name,
        dim=schema.dim,
        dtype=schema.dtype.upper(),
        seed=schema.seed,
        id=schema.id,
        version=schema.version,
    )
    _set_kind(message.init, _INITS, schema.init)
    _set_kind(message.optimizer, OPTIMIZERS, schema.optimizer)
    if schema.policy != RowPolicy():
        for part in message.policy.DESCRIPTOR.fields:
            if part.name != "evict_by":
                setattr(message.policy, part.name, getattr(schema.policy, part.name))
        message.policy.evict_by = EVICT_BY.index(schema.policy.evict_by)
    return message


def _policy_of(message: pb.RowPolicy) -> RowPolicy:
    if not 0 <= message.evict_by < len(EVICT_BY):
        raise not_allowed("RowPolicy.evict_by", message.evict_by, EVICT_BY)
    names = [part.name for part in message.DESCRIPTOR.fields if part.name != "evict_by"]
    return RowPolicy(**{name: getattr(message, name) for name in names}, evict_by=EVICT_BY[message.evict_by])


def schema_of_message(message: pb.TableSchema) -> TableSchema:
    """Returns the schema of a ``control_pb2.TableSchema``.

    Raises:
        InvalidArgument: a field is missing or out of range.
    """
    if not 0 <= message.dtype < len(DTYPES):
        raise not_allowed("TableSchema.dtype", message.dtype, DTYPES)
    return TableSchema(
        namespace=message.namespace,
        name=message.name,
        dim=message.dim,
        optimizer=_kind_of(message.optimizer, OPTIMIZERS, "optimizer"),
        dtype=DTYPES[message.dtype],
        init=_kind_of(message.init, _INITS, "init"),
        seed=message.seed,
        policy=_policy_of(message.policy) if message.HasField("policy") else RowPolicy(),
        id=message.id,
        version=message.version,
    )
