"""The order of a model's inputs and outputs, which decides what the weights of its tower mean.

A first layer reads its inputs side by side, and a model of several tasks has a head for each, so a tower that is
restored under another order of names computes something else from the same numbers. Only names show it, because
all shapes are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64_hexdigest

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition
from ...proto.features.feature_set import FeatureSet
from ..data.features import FeatureSpec
from ..models import FeatureEmbeddings
from ..session.compiled_module import plain_path
from .build_model import input_names

ModelOrder: TypeAlias = "dict[str, list[str]]"
KEY = "order"  # in the configuration that a checkpoint's manifest holds
ROWS = "rows"
TOWER_SHAPES = "tower"
_INPUTS = "inputs"


def order_of(job: JobConfig, spec: FeatureSpec) -> ModelOrder:
    """Returns the names of the inputs, the tasks, and the names within ``model.args``, each in its order."""
    order = {_INPUTS: list(input_names(job.model, spec)), "tasks": [task.name for task in job.all_tasks]}
    for name, value in job.model.args.items():
        order.update(_named(f"model.args.{name}", value))
    return order


def _named(path: str, value: Any) -> Iterator[tuple[str, list[str]]]:
    if isinstance(value, Mapping):
        yield path, [str(key) for key in value]
        for key, inner in value.items():
            yield from _named(f"{path}.{key}", inner)
    elif isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        yield path, list(value)


@dataclass(frozen=True)
class Change:
    """The inputs by which a job differs from the run of a checkpoint; those of both are in the same order.

    Attributes:
        added: the inputs that the checkpoint lacks.
        removed: the inputs that the job lacks.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def is_none(self) -> bool:
        """Whether the inputs are the same."""
        return not self.added and not self.removed

    @property
    def said(self) -> tuple[str, ...]:
        """The change in words, a sentence for each kind."""
        new = (f"the inputs {_listed(self.added)} are new, and their rows are initial",) if self.added else ()
        gone = (f"the inputs {_listed(self.removed)} are no longer there; their rows stay",) if self.removed else ()
        return (*new, *gone)


def check_order(config: Mapping[str, Any], mine: ModelOrder, where: str) -> None:
    """Checks that a checkpoint's tower was trained with the names in the order of this job.

    Args:
        config: the configuration that the manifest of the checkpoint holds.
        mine: the order of this job.
        where: the checkpoint, for error texts.

    Raises:
        FailedPrecondition: an order differs, or the checkpoint has none; the text names the setting.
    """
    for name, was, names in _orders(config, mine, where, "--resume"):
        if was != names:
            raise _other_order("--resume", where, name, was, names)


def order_change(
    config: Mapping[str, Any], mine: ModelOrder, where: str, option: str, *, refuses: bool = True
) -> Change:
    """Returns by which inputs a job differs from the run of a checkpoint.

    Args:
        config: the configuration that the manifest of the checkpoint holds.
        mine: the order of this job.
        where: the checkpoint, for error texts.
        option: the option that names it.
        refuses: whether inputs in another order, and other tasks or names in ``model.args``, are refused.

    Raises:
        FailedPrecondition: an order differs by more than inputs that are new or gone, or the checkpoint has none.
    """
    orders = list(_orders(config, mine, where, option))
    saved, now = next((was, names) for name, was, names in orders if name == _INPUTS)
    change = Change(tuple(each for each in now if each not in saved), tuple(each for each in saved if each not in now))
    for name, was, names in orders if refuses else ():
        # Names of inputs within model.args come and go with the inputs.
        rest = [[each for each in side if each not in (*change.added, *change.removed)] for side in (was, names)]
        if rest[0] != rest[1]:
            raise _other_order(option, where, name, was, names, "; or let the tower begin anew (--accept tower)")
    return change


def _orders(
    config: Mapping[str, Any], mine: ModelOrder, where: str, option: str
) -> Iterator[tuple[str, list[str], list[str]]]:
    saved = config.get(KEY)
    if not isinstance(saved, Mapping):
        raise FailedPrecondition(
            f"{option}: {where} does not say in which order its model has inputs and tasks, so its tower may mean "
            "something else here; begin a new run"
        )
    for name, names in mine.items():
        yield name, list(saved.get(name, ())), names


def _other_order(
    option: str, where: str, name: str, was: Sequence[str], names: Sequence[str], advice: str = ""
) -> FailedPrecondition:
    return FailedPrecondition(
        f"{option}: {where} has {name} in the order {_listed(was)}, and this job {_listed(names)}; the weights "
        f"of a tower are by place, so give them in the order of the checkpoint{advice}"
    )


def rows_of(model: nn.Module, features: FeatureSet | None) -> dict[str, list[int | None]]:
    """Returns, by feature, the rows of its table and the keys that it can give; None: any key.

    Args:
        model: the model; where it is not made of :class:`FeatureEmbeddings`, nothing is known of it.
        features: the features of the job; None: it has no section ``features``.
    """
    known = {} if features is None else {each.name for each in features.features}
    return {
        name: [rows, features.keys_of(name) if features is not None and name in known else None]
        for module in model.modules()
        if isinstance(module, FeatureEmbeddings)
        for name, rows in module.rows_by_feature.items()
    }


def check_rows(config: Mapping[str, Any], mine: Mapping[str, Any], where: str, option: str = "--resume") -> None:
    """Checks that the keys of a job find the rows that they found: the row of a key is the key modulo the rows.

    Args:
        config: the configuration that the manifest of the checkpoint holds.
        mine: the configuration of this run.
        where: the checkpoint, for error texts.
        option: the option that names it.

    Raises:
        FailedPrecondition: a table has another number of rows, of which keys make use.
    """
    saved = config.get(ROWS, {})
    for name, (rows, keys) in mine[ROWS].items():
        then, keys_then = saved.get(name, (rows, keys))
        is_whole = keys is not None and keys_then is not None and keys <= rows and keys_then <= then
        if rows != then and not is_whole:
            raise FailedPrecondition(
                f"{option}: {where} has {then} rows for the feature {name}, and this job {rows}; the row of a key is "
                f"the key modulo that number, so keep {then} (model.args.rows), or begin a new run"
            )


def tower_of(model: nn.Module) -> dict[str, int | str]:
    """Returns the number of a model's dense tensors, and a digest of their names and shapes."""
    shapes = [
        [plain_path(name), [] if is_lazy(each) else list(each.shape)]
        for name, each in model.named_parameters()
        if is_lazy(each) or each.numel() > 0
    ]
    return {"tensors": len(shapes), "digest": xxh3_64_hexdigest(json.dumps(shapes).encode())}


def check_tower(config: Mapping[str, Any], mine: Mapping[str, Any], where: str, option: str) -> None:
    """Checks that a tower whose tensors are rows of the servers has the shapes that it had.

    Args:
        config: the configuration that the manifest of the checkpoint holds.
        mine: the configuration of this run.
        where: the checkpoint, for error texts.
        option: the option that names it.

    Raises:
        FailedPrecondition: a name or a shape differs, so that the rows would be parts of other tensors.
    """
    then, now = config.get(TOWER_SHAPES), mine[TOWER_SHAPES]
    if then != now:
        count = then["tensors"] if isinstance(then, Mapping) else "unknown"
        raise FailedPrecondition(
            f"{option}: {where} has another tower: {count} tensors there and {now['tensors']} here, or of other names "
            "or shapes; its tensors are rows of the servers (train.dense ps), so give model.args as they were, or "
            "begin a new run"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12])
    return f"[{shown}{', ...' if len(names) > 12 else ''}]"
