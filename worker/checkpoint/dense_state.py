"""The whole ``state_dict`` of a model in a checkpoint: its names are those of the model without ``torch.compile``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...proto.errors import FailedPrecondition
from ..layers.embedding import DistributedLayer
from ..layers.table_handle import EXTRA_STATE
from ..session.compiled_module import bare, plain_path

_MOST_NAMED = 3
_DDP = "module."


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns the ``state_dict`` of a model, with or without DDP, by the names of the model before compilation."""
    return {plain_path(key): value for key, value in bare(model).state_dict().items()}


def plain_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Returns a saved state by plain names; older checkpoints of compiled models have parts ``_orig_mod`` in them.

    Args:
        state: the saved state.
        model: the model that will load it.
    """
    plain = {plain_path(key): value for key, value in state.items()}
    is_of_ddp = bool(plain) and all(key.startswith(_DDP) for key in plain)  # which was inside of the compiled model
    if is_of_ddp and not any(key.startswith(_DDP) for key in state_of(model)):
        return {key.removeprefix(_DDP): value for key, value in plain.items()}
    return plain


def load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state by plain names into a model, whose parts may be compiled."""
    inner = bare(model)
    present = {plain_path(key): key for key in inner.state_dict()}
    inner.load_state_dict({present.get(key, key): value for key, value in state.items()})


def load_fitting(model: nn.Module, state: Mapping[str, Any]) -> tuple[str, ...]:
    """Loads the tensors of a state whose name and shape a model has.

    Returns:
        The names of the model's other tensors, which stay as they are.
    """
    inner = bare(model)
    mine, optional = state_of(model), _handles(inner)
    fitting = {key: value for key, value in state.items() if key in mine and _has_shape_of(key, mine[key], value)}
    present = {plain_path(key): key for key in inner.state_dict()}
    inner.load_state_dict({present[key]: value for key, value in fitting.items()}, strict=False)
    return tuple(key for key in mine if key not in fitting and key not in optional)


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the plain names of an optimizer's parameters in its order; "" for one that is not of the model."""
    names = {id(parameter): plain_path(path) for path, parameter in bare(model).named_parameters()}
    return [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer_of_fitting(
    model: nn.Module, optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], anew: Collection[str]
) -> None:
    """Loads an optimizer's state of the parameters that a checkpoint has, by their names; the others begin anew.

    Args:
        model: the model.
        optimizer: its dense optimizer, with as many groups as the saved one.
        tree: the state of rank 0.
        anew: names of parameters whose state is not loaded.
    """
    saved, named = tree["optimizer"], tree["parameters"]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    # A parameter that is not of the model has no name, by which it could be found again.
    number_of = {name: number for name, number in zip(named, numbers, strict=True) if name}
    names = iter(enumerate(parameter_names(model, optimizer)))
    state, groups = {}, []
    for was, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        mine = [next(names) for _ in group["params"]]
        groups.append({**was, "params": [at for at, _ in mine]})
        state.update(
            {
                at: saved["state"][number_of[name]]
                for at, name in mine
                if name in number_of and name not in anew and number_of[name] in saved["state"]
            }
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_state(model: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Checks that names and shapes of a state are those of the model; modules that load in their own way are left out.

    Args:
        model: the model that will load the state.
        state: the state, by plain names.
        where: the URL of the checkpoint, for error texts.

    Raises:
        FailedPrecondition: a name or shape differs; the text names at most three of each kind.
    """
    own, optional = tuple(_own_prefixes(bare(model))), _handles(bare(model))
    mine = {key: value for key, value in state_of(model).items() if not key.startswith(own)}
    saved = {key: value for key, value in state.items() if not key.startswith(own)}
    differing = [
        f"{key} is {tuple(saved[key].shape)} there and {tuple(value.shape)} here"
        for key, value in mine.items()
        if key in saved and not _has_shape_of(key, value, saved[key])
    ]
    problems = [
        f"{what} {_some(names)}"
        for what, names in (
            ("it lacks", [key for key in mine if key not in saved and key not in optional]),
            ("this model lacks", [key for key in saved if key not in mine]),
            ("the shapes differ:", differing),
        )
        if names
    ]
    if problems:
        raise FailedPrecondition(f"restore: {where} has another model: {'; '.join(problems)}; build the same model")


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _has_shape_of(key: str, mine: Any, saved: Any) -> bool:
    """Returns whether torch can load ``saved``; it takes one number of shape (1) for one of shape ()."""
    is_tensor = isinstance(mine, Tensor) and isinstance(saved, Tensor)
    if key.rpartition(".")[2] == EXTRA_STATE or not is_tensor or is_lazy(mine):
        return True
    return bool(mine.shape == saved.shape or (mine.dim() == 0 and saved.dim() == 1))


def _handles(model: nn.Module) -> set[str]:
    """Returns the names of the handles of tables, which a state need not have."""
    return {
        f"{plain_path(path)}.{EXTRA_STATE}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, DistributedLayer)
    }


def _own_prefixes(model: nn.Module) -> Iterator[str]:
    """Yields the prefixes of the names that a module's own code loads, which may take other names or shapes."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        yield ""
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
        # Hooks of FSDP2 bring parameters into parts, and change no name.
        has_hooks = any(not _module_of(getattr(hook, "hook", hook)).startswith("torch.distributed.") for hook in hooks)
        method = type(module)._load_from_state_dict
        is_known = isinstance(module, DistributedLayer) or _module_of(method).startswith("torch.")
        if has_hooks or not is_known:
            plain = plain_path(path)
            yield f"{plain}." if plain else ""


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""
