"""The workers of a job whose processes share towers: groups of processes in place of single processes.

With ``train.parallel.tensor`` t, process p is the member p mod t of the worker p div t. Members of one worker read the
same data. So everything that is counted or gathered over workers is so among members of the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...proto.config.parallel_config import ParallelConfig, check_ranks
from ..session.mesh_place import own_group
from .process_group import Value, WorkerGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA, TENSOR = "data", "tensor"


@dataclass(frozen=True)
class ParallelGroup(WorkerGroup):
    """This process as a member of a worker; ``rank`` and ``world`` count workers.

    Attributes:
        mesh: all processes, with the dimensions ``data`` and ``tensor``, on the device of the model.
        member: the number of this process among those of its worker.
        peers: the process group of the members of the same number in all workers, for tensors and for objects.
    """

    mesh: DeviceMesh | None = None
    member: int = 0
    peers: Any = None

    @property
    def is_alone(self) -> bool:
        """False: a worker has other members, or there are other workers."""
        return False

    @property
    def is_first(self) -> bool:
        """Whether this process is the first member of worker 0, which writes what the job writes once."""
        return self.rank == 0 and self.member == 0

    @property
    def makes_shared(self) -> bool:
        """Whether the value that this process passes to :meth:`share` matters."""
        return self.is_first

    def share(self, value: Value, *, what: str = "") -> Value:
        """Returns the value of the first process on every process."""
        self._meet(what)
        box: list[Any] = [value if self.is_first else None]
        dist.broadcast_object_list(box, src=0)
        shared: Value = box[0]
        return shared

    def to_rank(self, value: Value, rank: int) -> list[Value] | None:
        """Returns every worker's value, in rank order, on one worker; None on other workers."""
        parts: list[Any] | None = [None] * self.world if self.rank == rank else None
        dist.gather_object(value, parts, dst=dist.get_global_rank(self.peers, rank), group=self.peers)
        return parts

    def collect(self, value: Value, *, what: str = "") -> list[Value]:
        """Returns every worker's value, in rank order, on every process."""
        self._meet(what)
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, value, group=self.peers)
        return parts


def in_groups(parallel: ParallelConfig | None, group: WorkerGroup) -> WorkerGroup:
    """Returns the workers that processes form; ``group`` itself without ``train.parallel``.

    Args:
        parallel: the section of the job.
        group: the processes of the job. Every process calls this function.

    Raises:
        InvalidArgument: the processes cannot form the groups.
    """
    if parallel is None:
        return group
    from torch.distributed.device_mesh import init_device_mesh  # slow to import

    check_ranks(parallel, group.world)
    workers = group.world // parallel.tensor
    mesh = init_device_mesh(group.device.type, (workers, parallel.tensor), mesh_dim_names=(DATA, TENSOR))
    worker, member = divmod(group.rank, parallel.tensor)
    peers = own_group(mesh, 0)
    return ParallelGroup(worker, workers, device=group.device, mesh=mesh, member=member, peers=peers)
