"""The order of a model's inputs and outputs, which decides what the weights of its tower mean.

A first layer reads its inputs side by side, and a model of several tasks has a head for each, so a tower that is
restored under another order of names computes something else from the same numbers. Only names show it, because
all shapes are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition
from ..data.features import FeatureSpec
from .build_model import input_names

ModelOrder: TypeAlias = "dict[str, list[str]]"
KEY = "order"  # in the configuration that a checkpoint's manifest holds


def order_of(job: JobConfig, spec: FeatureSpec) -> ModelOrder:
    """Returns the names of the inputs, the tasks, and the names within ``model.args``, each in its order."""
    order = {"inputs": list(input_names(job.model, spec)), "tasks": [task.name for task in job.all_tasks]}
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


def check_order(config: Mapping[str, Any], mine: ModelOrder, where: str, option: str = "--resume") -> None:
    """Checks that a checkpoint's tower was trained with the names in the order of this job.

    Args:
        config: the configuration that the manifest of the checkpoint holds.
        mine: the order of this job.
        where: the checkpoint, for error texts.
        option: the option that names it.

    Raises:
        FailedPrecondition: an order differs, or the checkpoint has none; the text names the setting.
    """
    saved = config.get(KEY)
    if not isinstance(saved, Mapping):
        raise FailedPrecondition(
            f"{option}: {where} does not say in which order its model has inputs and tasks, so its tower may mean "
            "something else here; begin a new run"
        )
    for name, names in mine.items():
        was = list(saved.get(name, ()))
        if was != names:
            raise FailedPrecondition(
                f"{option}: {where} has {name} in the order {_listed(was)}, and this job {_listed(names)}; the weights "
                "of a tower are by place, so give them in the order of the checkpoint"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:12])
    return f"[{shown}{', ...' if len(names) > 12 else ''}]"
