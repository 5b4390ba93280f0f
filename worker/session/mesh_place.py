"""The place of a rank in a user's device mesh: the worker that it belongs to, and its tensor group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from .rank_beats import timeout_of_default_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA_NAMES = ("data", "dp", "fsdp", "replicate", "shard", "dp_replicate", "dp_shard")
TENSOR_NAMES = ("tensor", "tp")
_PIPELINE_NAMES = ("pipeline", "pipe", "pp")


@dataclass(frozen=True)
class MeshPlace:
    """The place of this rank in a mesh.

    Attributes:
        worker: the number of the worker that this rank belongs to, which counts along the dimensions of data.
        workers: the number of workers, which is the number of tensor groups.
        tensor_rank: the position of this rank in its tensor group.
        tensor_ranks: the number of ranks in the tensor group.
        group: a process group of the tensor group, for the session alone; see :func:`own_group`. None: the mesh has no
            tensor dimension of 2 ranks or more.
    """

    worker: int
    workers: int
    tensor_rank: int = 0
    tensor_ranks: int = 1
    group: Any = None


def place_in_mesh(mesh: DeviceMesh) -> MeshPlace:
    """Returns the place of this rank in a mesh over all ranks. Every rank calls it.

    Args:
        mesh: a mesh with a name for each dimension. Ranks that differ in a dimension of ``DATA_NAMES`` are different
            workers; ranks that differ in a dimension of ``TENSOR_NAMES`` alone are one worker.

    Raises:
        InvalidArgument: ``mesh`` is no DeviceMesh, or has a dimension without a name or of another name, or two tensor
            dimensions, or a dimension for pipeline parallelism, or does not hold every rank once with rank 0 first.
        FailedPrecondition: torch.distributed is not initialised.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise not_allowed("connect.mesh", type(mesh).__name__, "torch.distributed.device_mesh.DeviceMesh, or None")
    if not dist.is_available() or not dist.is_initialized():
        raise FailedPrecondition("connect.mesh: it needs torch.distributed to be initialised")
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    for name in names:
        _check_name(name)
    ranks = mesh.mesh.flatten().tolist()
    if sorted(ranks) != list(range(dist.get_world_size())) or ranks[0] != 0:
        raise not_allowed(
            "connect.mesh", ranks, f"a mesh that holds each of the {dist.get_world_size()} ranks once, rank 0 first"
        )
    tensor = [index for index, name in enumerate(names) if name in TENSOR_NAMES]
    if len(tensor) > 1:
        raise not_allowed("connect.mesh", names, "at most one tensor dimension")
    place = mesh.get_coordinate()
    assert place is not None, "the mesh holds every rank"
    worker, workers = 0, 1
    for index in range(mesh.ndim):
        if index not in tensor:
            worker = worker * mesh.size(index) + place[index]
            workers *= mesh.size(index)
    if not tensor or mesh.size(tensor[0]) == 1:
        return MeshPlace(worker, workers)
    return MeshPlace(worker, workers, place[tensor[0]], mesh.size(tensor[0]), own_group(mesh, tensor[0]))


def own_group(mesh: DeviceMesh, dim: int) -> Any:
    """Makes a process group of the ranks that differ from this one in a dimension alone. Every rank calls it.

    A group of the mesh may have another timeout than the default group, and a backend for the mesh's devices alone.
    This one has both from the default group: with ``cpu:gloo,cuda:nccl``, tensors on CUDA go by NCCL, those on the host
    and objects by gloo.

    Args:
        mesh: a mesh over all ranks.
        dim: the number of the dimension.
    """
    mine, found = dist.get_rank(), None
    for ranks in mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist():
        group = dist.new_group(ranks, timeout=timeout_of_default_group())
        if mine in ranks:
            found = group
    return found


def _check_name(name: str | None) -> None:
    if name in _PIPELINE_NAMES:
        raise InvalidArgument(
            f"connect.mesh: {name!r} is a dimension of pipeline parallelism, whose stages read different layers of one "
            "batch at different times; a session's step is one forward and backward over all layers, so pipeline "
            "parallelism is not possible; allowed: dimensions of data and one tensor dimension"
        )
    if name not in (*DATA_NAMES, *TENSOR_NAMES):
        allowed = f"for data {', '.join(DATA_NAMES)}; for tensor parallelism {', '.join(TENSOR_NAMES)}"
        raise not_allowed("connect.mesh: mesh_dim_names", name, allowed)
