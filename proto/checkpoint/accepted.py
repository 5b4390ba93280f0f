"""What a restore may change of a table: its dim, dtype or optimizer, where the caller accepts it by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument, not_allowed
from ..schema import TableSchema

KEYS = ("dim", "dtype", "optimizer")
_EVERY = "*"
_ALLOWED = "TABLE.dim, TABLE.dtype or TABLE.optimizer, where TABLE * means every table"


def check_accepted(accepted: Iterable[str], what: str) -> None:
    """Checks the names of changes.

    Args:
        accepted: texts TABLE.KEY.
        what: the name of the option, for error texts.

    Raises:
        InvalidArgument: a text is none.
    """
    for each in accepted:
        table, _, key = each.rpartition(".")
        if not table or key not in KEYS:
            raise not_allowed(what, each, _ALLOWED)


def check_named(accepted: Iterable[str], restored: Iterable[str]) -> None:
    """Checks that each accepted change is of a table that is restored.

    Args:
        accepted: texts NAMESPACE/NAME.KEY or ``*.KEY``.
        restored: the full names of the tables.

    Raises:
        InvalidArgument: a table is not among them.
    """
    known = sorted(restored)
    for each in accepted:
        table = each.rpartition(".")[0]
        if table not in (_EVERY, *known):
            raise InvalidArgument(
                f"accept: table {table!r} is not restored; restored are: {', '.join(known) or 'none'}"
            )


def is_accepted(accepted: Iterable[str], table: str, key: str) -> bool:
    """Whether the change of ``key`` of the table with a full name is accepted."""
    return not {f"{table}.{key}", f"{_EVERY}.{key}"}.isdisjoint(accepted)


def changes(present: TableSchema, saved: TableSchema) -> list[tuple[str, Any, Any]]:
    """Returns what keeps rows of ``saved`` from being rows of ``present``: key, present value, saved value."""
    return [(key, now, then) for key in KEYS if (now := _fact(present, key)) != (then := _fact(saved, key))]


def _fact(schema: TableSchema, key: str) -> Any:
    return schema.optimizer.state_layout if key == "optimizer" else getattr(schema, key)


def loses_state(changed: Sequence[str]) -> bool:
    """Whether the optimizer's state begins anew where these keys of a table changed: it has the layout of both."""
    return "optimizer" in changed or "dim" in changed


def as_float32(weights: NDArray[Any]) -> NDArray[np.float32]:
    """Returns stored weights as float32; uint16 are the bits of bfloat16."""
    if weights.dtype == np.uint16:
        return (weights.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return weights.astype(np.float32)


def stored_as(weights: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns contiguous float32 weights as a table of a dtype stores them, rounded to nearest even.

    Args:
        weights: the weights.
        dtype: "float32", "float16", or "bfloat16", whose bits come as uint16.
    """
    if dtype == "bfloat16":
        bits = weights.view(np.uint32)
        values: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return values
    return weights.astype(np.float16 if dtype == "float16" else np.float32)
