"""The class of a job's model: its arguments, what its forward takes, and the layers that read each table."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ...proto.config.model_config import ModelConfig
from ...proto.errors import FailedPrecondition, InvalidArgument, SparserowError, not_allowed
from ...proto.features.base import Feature
from ...proto.features.feature_set import FeatureSet
from .. import models
from ..data import FeatureSpec
from .own_module import imported, nearest_of
from .user_errors import line_of_error, place_of

_OTHERS = "*"  # in rows: the features of keys that no argument names


def class_of(config: ModelConfig) -> type[nn.Module]:
    """Imports the class of a model; the working directory is searched first.

    Args:
        config: the section ``model`` of the job.

    Raises:
        InvalidArgument: the module cannot be imported, or has no such class of ``nn.Module``.
    """
    module_name, _, name = config.class_.rpartition(":")
    if not module_name:
        return _of_the_zoo(name)
    module = imported("model.class", module_name)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        classes = [each for each, value in vars(module).items() if isinstance(value, type) and _is_model(value)]
        raise InvalidArgument(f"model.class: {module_name} has no class {name} of nn.Module{nearest_of(name, classes)}")
    return found


def _is_model(value: type) -> bool:
    return issubclass(value, nn.Module) and not value.__module__.startswith("torch.")


def _of_the_zoo(name: str) -> type[nn.Module]:
    names = [each for each in models.__all__ if inspect.isclass(getattr(models, each))]
    if name not in names:
        nearest = nearest_of(name, names)
        raise InvalidArgument(
            f"model.class: sparserow has no model {name}{nearest}; a class of one's own is MODULE:CLASS"
        )
    found: type[nn.Module] = getattr(models, name)
    return found


def make(config: ModelConfig, features: FeatureSpec) -> nn.Module:
    """Makes the model of a job, with initial weights from torch's generator.

    Args:
        config: the section ``model`` of the job.
        features: the inputs that the model reads.

    Raises:
        InvalidArgument: the class cannot be imported, takes other arguments, or refuses a value.
    """
    kind = class_of(config)
    arguments = arguments_of(config, kind, features)
    try:
        return kind(**arguments)
    except (InvalidArgument, FailedPrecondition) as error:
        raise InvalidArgument(f"model.args: {config.class_} refuses them: {error}") from error
    except SparserowError:
        raise
    except Exception as error:  # the code of a class may raise anything
        place = place_of(error, config.class_)
        words = str(error) if place is None and isinstance(error, ValueError) else line_of_error(error, place)
        raise InvalidArgument(f"model.args: {config.class_} refuses them: {words}") from error


def arguments_of(config: ModelConfig, kind: type[nn.Module], features: FeatureSpec) -> dict[str, Any]:
    """Returns ``model.args`` with what the features of the job say of the class's arguments.

    Args:
        config: the section ``model`` of the job.
        kind: the class.
        features: the inputs that the model reads.

    Raises:
        InvalidArgument: the class has no such argument, or lacks one; or it is refused by :func:`_with_pools` or
            :func:`_with_features`; the text names it.
    """
    _check_names(config, kind)
    arguments = _with_pools(config, kind, dict(features.pools))
    return arguments if ":" in config.class_ else _with_features(arguments, kind, features)


def _with_features(arguments: dict[str, Any], kind: type[nn.Module], features: FeatureSpec) -> dict[str, Any]:
    """Returns the arguments of a model of this package, with each feature that the job leaves to the model.

    In ``rows``, ``'*'`` stands for each feature of keys that no argument names: it has a row for each key that the
    feature can give, where that is known, or else so many. ``numbers``, where it is left out, are all numbers.
    """
    takes, given = inspect.signature(kind).parameters, dict(arguments)
    if "numbers" in takes and "numbers" not in given:
        given["numbers"] = [each.name for each in features.dense]
    rows = given.get("rows")
    if isinstance(rows, Mapping) and _OTHERS in rows:
        counts = dict(features.key_counts)
        by_name = [value for name, value in given.items() if isinstance(value, Mapping) and name != "pools"]
        named = {name for value in by_name for name in value}
        others = [name for name in (*features.sparse_names, *features.lists) if name not in named]
        left = {name: counts.get(name, rows[_OTHERS]) for name in others}
        given["rows"] = {**{name: count for name, count in rows.items() if name != _OTHERS}, **left}
    return given


def _check_names(config: ModelConfig, kind: type[nn.Module]) -> None:
    parameters = inspect.signature(kind).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = [name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for name in config.args:
        if name not in named and not takes_any:
            raise InvalidArgument(f"model.args.{name}: {config.class_} has no such argument{nearest_of(name, named)}")
    for name in named:
        if parameters[name].default is inspect.Parameter.empty and name not in config.args:
            raise InvalidArgument(f"model.args.{name}: is missing, and {config.class_} has no default for it")


def _with_pools(config: ModelConfig, kind: type[nn.Module], pools: Mapping[str, str]) -> dict[str, Any]:
    """Returns ``model.args`` with the pools of features in its argument ``pools``.

    ``pools`` has how lists are pooled, by the name of each feature that says so.

    Raises:
        InvalidArgument: the class has no argument ``pools``, or ``model.args`` has another pool for a feature.
    """
    if not pools:
        return dict(config.args)
    if "pools" not in inspect.signature(kind).parameters:
        raise InvalidArgument(
            f"features.{next(iter(pools))}.pool: has no effect, as {config.class_} has no argument pools, and pools by "
            "itself; remove it"
        )
    given = config.args.get("pools") or {}
    for name, pool in pools.items():
        if isinstance(given, Mapping) and given.get(name, pool) != pool:
            raise InvalidArgument(
                f"features.{name}.pool: is {pool}, and model.args.pools has {given[name]!r} for it; name one of them"
            )
    return {**config.args, "pools": {**pools, **given}}


def inputs_of(config: ModelConfig, features: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the features that the forward of a model takes, in its order.

    Args:
        config: the section ``model`` of the job.
        features: the names of the features of the data. A forward with ``**tensors`` takes all.

    Raises:
        InvalidArgument: the class cannot be imported, takes something else than features, or leaves one out.
    """
    taken: list[str] = []
    parameters = list(inspect.signature(class_of(config).forward).parameters.values())[1:]
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            return (*taken, *(name for name in features if name not in taken))
        if each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
            raise InvalidArgument(f"model.class: forward of {config.class_} has {each}; allowed: arguments by name")
        if each.name in features:
            taken.append(each.name)
        elif each.default is each.empty:
            nearest = nearest_of(each.name, features)
            raise InvalidArgument(
                f"model.class: forward of {config.class_} takes {each.name!r}, which is no feature{nearest}"
            )
    unused = [name for name in features if name not in taken]
    if unused:
        raise InvalidArgument(
            f"model.class: forward of {config.class_} does not take the feature {unused[0]!r}; its arguments: "
            f"{', '.join(taken) or 'none'}. Leave the feature out, or give forward an argument for it"
        )
    return tuple(taken)


def check_reads(config: ModelConfig, model: nn.Module, features: Sequence[str]) -> None:
    """Checks the features that a model says it reads, by an attribute ``reads`` with their names.

    A forward with ``**tensors`` names none of them, so that its signature cannot be checked (:func:`inputs_of`).

    Args:
        config: the section ``model`` of the job.
        model: the model. One without such an attribute is not checked.
        features: the names of the features of the data.

    Raises:
        InvalidArgument: the model reads something else than features, or leaves one out; or ``reads`` has no names.
    """
    reads: Any = getattr(model, "reads", None)
    if reads is None:
        return
    if isinstance(reads, str) or not isinstance(reads, Iterable) or not all(isinstance(name, str) for name in reads):
        raise not_allowed(f"model.class: the attribute reads of {config.class_}", reads, "a tuple of names, or None")
    names = tuple(reads)
    for name in names:
        if name not in features:
            raise InvalidArgument(
                f"model.args: {config.class_} reads {name!r}, which is no feature{nearest_of(name, features)}"
            )
    unused = [name for name in features if name not in names]
    if unused:
        raise InvalidArgument(
            f"model.args: {config.class_} does not read the feature {unused[0]!r}; it reads: "
            f"{', '.join(names) or 'none'}. Leave the feature out, or name it in model.args"
        )


def tie_tables(config: ModelConfig, model: nn.Module) -> None:
    """Has the layers of each table of ``model.tables`` share the weight of the first of them.

    Args:
        config: the section ``model`` of the job.
        model: the model, before its layers are distributed.

    Raises:
        InvalidArgument: the model has no embedding layer at a path, or one that stays in the workers; or layers of one
            table have different sizes.
    """
    layers = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    for table, paths in config.tables.items():
        for path in paths:
            if path not in layers:
                raise InvalidArgument(
                    f"model.tables.{table}: the model has no embedding layer {path!r}{nearest_of(path, list(layers))}"
                )
            rows = layers[path].num_embeddings
            if rows < config.min_rows and config.backend == "ps":
                raise InvalidArgument(
                    f"model.tables.{table}: layer {path!r} has {rows} rows, fewer than model.min_rows "
                    f"({config.min_rows}), so it stays in the workers; lower model.min_rows"
                )
            first, other = layers[paths[0]].weight, layers[path].weight
            if first.shape != other.shape:
                raise InvalidArgument(
                    f"model.tables.{table}: layer {path!r} has the shape {tuple(other.shape)}, and {paths[0]!r} "
                    f"{tuple(first.shape)}; allowed: one shape"
                )
            layers[path].weight = first


def check_key_counts(features: FeatureSet, rows: Mapping[str, int]) -> None:
    """Checks that the tables which features name have rows for all keys that the features can give.

    Args:
        features: the features of the job.
        rows: the number of rows of each distributed table by its name.

    Raises:
        InvalidArgument: there is no such table, or a feature has more keys than its table has rows.
    """
    for feature in features.features:
        table = _table_of(feature)
        if table is None:
            continue
        if table not in rows:
            raise InvalidArgument(
                f"features.{feature.name}.table: there is no table {table!r}{nearest_of(table, list(rows))}"
            )
        count = features.keys_of(feature.name)
        if count is not None and count > rows[table]:
            raise InvalidArgument(
                f"features.{feature.name}.table: table {table!r} has {rows[table]} rows, but the feature can give "
                f"{count} keys"
            )


def _table_of(feature: Feature) -> str | None:
    table: str | None = getattr(feature, "table", None)
    return table
