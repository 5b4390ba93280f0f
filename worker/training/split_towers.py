"""Splits the MLPs of a model over the processes of a group: Shoeybi et al., "Megatron-LM" (2019), section 3.

Of each pair of linear layers the first has some of its columns on a process, and the second the same of its rows, so
that one sum behind the second gives what the whole pair gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ...proto.errors import InvalidArgument, not_allowed
from ..models import Tower

# They work element by element, so that each process can apply them to its columns.
_BETWEEN = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout)


def towers_of(model: nn.Module) -> dict[str, nn.Sequential]:
    """Returns the MLPs of a model by their paths: each ``sr.models.Tower``, and those that the model names.

    A class names the paths of its own, which are ``nn.Sequential``, in an attribute ``mlps``.

    Raises:
        InvalidArgument: ``mlps`` names something else.
    """
    found: dict[str, nn.Sequential] = {path: each for path, each in model.named_modules() if isinstance(each, Tower)}
    named: Any = getattr(model, "mlps", ())
    if isinstance(named, nn.Module):  # a layer of that name, and not names
        return found
    if isinstance(named, str) or not isinstance(named, Iterable):
        raise not_allowed("model.class: the attribute mlps", named, "a tuple of paths of nn.Sequential")
    modules = dict(model.named_modules())
    for path in named:
        tower = modules.get(path)
        if not isinstance(tower, nn.Sequential):
            what = "no layer" if tower is None else f"a {type(tower).__name__}"
            raise InvalidArgument(f"model.class: mlps names {path!r}, which is {what}; allowed: an nn.Sequential")
        found.setdefault(path, tower)
    return found


def check_towers(model: nn.Module, tensor: int) -> None:
    """Checks that each MLP of a model can be split over the processes of a group.

    Args:
        model: the model; its parameters may be on the meta device.
        tensor: the number of processes of a group.

    Raises:
        InvalidArgument: the model has no MLP with two linear layers, a width that is no multiple of ``tensor``, or a
            layer between two of them that does not work element by element.
    """
    if tensor == 1:
        return
    count = 0
    for path, first, second in _pairs(model):
        tower = model.get_submodule(path)
        _check_between(path, tower, first, second)
        layer = tower.get_submodule(first)
        assert isinstance(layer, nn.Linear)
        width = layer.out_features
        if width % tensor:
            raise not_allowed(
                f"train.parallel.tensor: the width of {_joined(path, first)}",
                width,
                f"multiples of {tensor}, as of every second hidden layer",
            )
        count += 1
    if not count:
        raise InvalidArgument(
            "train.parallel.tensor: the model has no MLP with two linear layers to split; a class of your own names "
            "its MLPs, which are nn.Sequential, in an attribute mlps"
        )


def split_towers(model: nn.Module, mesh: Any) -> None:
    """Splits the pairs of linear layers of each MLP over a mesh of one dimension.

    Raises:
        InvalidArgument: see :func:`check_towers`.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # slow to import

    check_towers(model, mesh.size())
    plan: dict[str, Any] = {}
    for path, first, second in _pairs(model):
        plan |= {_joined(path, first): ColwiseParallel(), _joined(path, second): RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def _pairs(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yields the path of an MLP and the names of two of its linear layers, pair by pair."""
    for path, tower in towers_of(model).items():
        layers = [name for name, layer in tower.named_children() if isinstance(layer, nn.Linear)]
        for first, second in zip(layers[::2], layers[1::2], strict=False):
            yield path, first, second


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_between(path: str, tower: nn.Module, first: str, second: str) -> None:
    names = [name for name, _ in tower.named_children()]
    for name in names[names.index(first) + 1 : names.index(second)]:
        layer = tower.get_submodule(name)
        if not isinstance(layer, _BETWEEN):
            raise InvalidArgument(
                f"train.parallel.tensor: {_joined(path, name)} is a {type(layer).__name__}, which does not work "
                "element by element, so that layers around it cannot be split; allowed: "
                f"{', '.join(each.__name__ for each in _BETWEEN)}"
            )
