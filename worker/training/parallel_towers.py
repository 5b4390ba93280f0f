"""Wraps the model of a job for training on several processes: DDP, or towers that processes have in parts.

tensor:  pairs of linear layers of MLPs (split_towers.py). Other parameters are the same on all members of a worker.
fsdp:    the parameters that are left on a process, sharded over the workers.
neither: gradients are averaged over the workers as soon as backward has them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...proto.config.train_config import TrainConfig
from ...proto.errors import InvalidArgument
from ..layers.embedding import copy_sharing_rows
from ..lookups.makers.tensor_group import without_group
from .parallel_group import DATA, TENSOR, ParallelGroup
from .process_group import WorkerGroup
from .split_towers import split_towers

_NAMED = 4  # parameters in an error text


class WholeModel:
    """A copy of a model on the host of one process, into which the parts of all processes can be gathered.

    Args:
        model: the model before it is wrapped.
        group: this process and its peers. The first process alone has the copy.
    """

    def __init__(self, model: nn.Module, group: WorkerGroup) -> None:
        self._copy = without_group(copy_sharing_rows(model).to("cpu")) if group.is_first else None

    def gathered(self, model: nn.Module) -> nn.Module:
        """Gathers the parts of the wrapped model; every process calls it.

        Returns:
            The whole model on the first process, and ``model`` itself on the others.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # slow to import

        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self._copy is None:
            return model
        self._copy.load_state_dict(state)
        return self._copy.train(model.training)


def wrapped(model: nn.Module, train: TrainConfig, group: WorkerGroup) -> nn.Module:
    """Wraps the model of a job; its parameters are those to train from then on.

    Args:
        model: the model, the same on every process. With ``train.parallel`` it is changed in place.
        train: the section ``train`` of the job.
        group: this process and its peers.

    Raises:
        InvalidArgument: ``parallel.tensor`` finds no pair of layers that it can split, or
            ``find_unused_parameters`` is true where DDP is not used.
    """
    parallel, finds = train.parts, train.find_unused_parameters
    if not isinstance(group, ParallelGroup) or parallel is None:
        if _has_dense_gradients(model) and not group.is_alone:
            return DistributedDataParallel(model, find_unused_parameters=finds)
        if finds and group.is_alone:
            raise InvalidArgument("train.find_unused_parameters: true needs at least 2 workers; this job has 1")
        if finds:
            text = "true has no effect, as the model has no parameters besides its tables"
            raise InvalidArgument(f"train.find_unused_parameters: {text}")
        return model
    assert group.mesh is not None
    if parallel.tensor > 1:
        split_towers(model, group.mesh[TENSOR])
    if parallel.shard == "all":
        from torch.distributed.fsdp import fully_shard  # slow to import

        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # no step changes logits in place
        fully_shard(model, mesh=group.mesh[DATA])
    elif group.world > 1:
        average_in_backward(model, group.peers, group.world)
    return model


def _has_dense_gradients(model: nn.Module) -> bool:
    """Returns whether DDP has a gradient to average; a model of tables alone, or with a frozen tower, has none."""
    left_out = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    dense = (each for name, each in model.named_parameters() if name not in left_out and each.numel() > 0)
    return any(each.requires_grad for each in dense)


def check_reduced(model: DistributedDataParallel) -> None:
    """Checks after backward that DDP has averaged every gradient, before a step is made of them.

    torch says so in the next forward alone, when the step was made with the gradients of this worker.

    Raises:
        InvalidArgument: backward has not reached each parameter; the text names them.
    """
    try:
        model._check_reducer_finalized()
    except RuntimeError:
        left_out = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
        names = [
            name
            for name, each in model.module.named_parameters()
            if each.requires_grad and each.grad is None and each.numel() and name not in left_out
        ]
        named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        remedy = (
            "each output of the forward must be part of a loss"
            if model.find_unused_parameters
            else "allowed: true, for a branch that a batch may not take, or a forward that uses each parameter"
        )
        raise InvalidArgument(
            f"train.find_unused_parameters: {str(model.find_unused_parameters).lower()} is not enough, as backward did "
            f"not reach {named or 'a parameter'} on this worker; {remedy}"
        ) from None


def average_in_backward(model: nn.Module, peers: Any, world: int) -> None:
    """Has backward average each gradient, or this process's part of it, over the workers.

    With several backward passes a step, the gradient so far is averaged again, which changes nothing.

    Args:
        model: the model.
        peers: the process group of the processes that have the same parts.
        world: the number of workers.
    """

    def average(parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        with torch.no_grad():
            dist.all_reduce(local.div_(world), group=peers)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def clip_parts(parameters: list[nn.Parameter], norm: float) -> None:
    """Clips the total L2 norm of gradients that processes have in parts; every process calls it.

    A part that several processes have is counted once, by a share of its square on each. The factor is that of torch's
    ``clip_grad_norm_``.

    Args:
        parameters: the parameters of the dense tower.
        norm: the largest norm.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    locals_ = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for grad, local in zip(grads, locals_, strict=True):
        total += local.double().square().sum() * _parts_of(grad)
    dist.all_reduce(total)
    factor = torch.clamp(norm / ((total / dist.get_world_size()).sqrt() + 1e-6), max=1.0)
    for local in locals_:
        local.mul_(factor.to(local.dtype))


def _parts_of(grad: Tensor) -> int:
    """Returns in how many different parts the processes have a gradient."""
    parts = 1
    placements = getattr(grad, "placements", ())
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            parts *= grad.device_mesh.size(dimension)  # type: ignore[attr-defined]
    return parts
