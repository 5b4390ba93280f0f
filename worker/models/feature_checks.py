"""Checks the features that a model is made for, and those that its forward gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from .jagged import Feature
from .pools import POOLS

_TAKEN = frozenset(dir(nn.ModuleDict()))  # torch refuses a layer of such a name


def check_arguments(
    rows: Mapping[str, int], numbers: Sequence[str], shared: Mapping[str, str], pools: Mapping[str, str]
) -> None:
    """Checks the arguments of a model that name features.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        numbers: the features that are numbers.
        shared: other features of keys or lists, each with the feature of ``rows`` whose table it reads.
        pools: how a list is pooled, by feature.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """
    for name, count in rows.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"rows[{name!r}]={count!r} is not allowed; allowed: an integer >= 1")
        if not name or "." in name or name in _TAKEN:
            raise ValueError(f"rows: {name!r} is not allowed; allowed: a name that a layer of torch can have")
    for name, table in shared.items():
        if table not in rows:
            raise ValueError(f"shared[{name!r}]={table!r} is not allowed; allowed: {_listed(rows)}")
    names = [*rows, *shared, *numbers]
    if not names:
        raise ValueError("rows={}, numbers=[] are not allowed; allowed: at least one feature")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rows, shared, numbers: feature {name!r} is named twice; allowed: once")
    for name, pool in pools.items():
        if name not in rows and name not in shared:
            raise ValueError(f"pools: there is no feature {name!r}; allowed: {_listed([*rows, *shared])}")
        if pool not in POOLS:
            raise ValueError(f"pools[{name!r}]={pool!r} is not allowed; allowed: {', '.join(POOLS)}")


def check_choice(argument: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError when ``value`` of an argument is not among those that are allowed."""
    if value not in allowed:
        raise ValueError(f"{argument}={value!r} is not allowed; allowed: {', '.join(allowed)}")


def check_features(tensors: Mapping[str, Feature], names: Iterable[str]) -> None:
    """Checks that a model gets the features that it reads, and no others.

    Args:
        tensors: the features that the model gets, by name.
        names: the features that it reads.

    Raises:
        ValueError: a feature is missing, or is not read; the text names it and what is allowed.
    """
    allowed = dict.fromkeys(names)
    for name in allowed:
        if name not in tensors:
            raise ValueError(f"features: the model reads {name!r}, which is not there; there are: {_listed(tensors)}")
    for name in tensors:
        if name not in allowed:
            raise ValueError(f"features: the model does not read {name!r}; allowed: {_listed(allowed)}")


def single(name: str, feature: Feature) -> Tensor:
    """Returns a feature that has one value a sample, (B).

    Raises:
        ValueError: the feature is a list.
    """
    if isinstance(feature, Tensor):
        return feature
    raise ValueError(f"features: {name!r} is a list; allowed: one value a sample, or a pool of it in `pools`")


def list_of(name: str, feature: Feature) -> tuple[Tensor, ...]:
    """Returns a feature that is a list: values (m), offsets (B + 1) and, where it has some, weights (m).

    Raises:
        ValueError: the feature has one value a sample.
    """
    if not isinstance(feature, Tensor):
        return feature
    raise ValueError(f"features: {name!r} has one value a sample; allowed: a list")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
