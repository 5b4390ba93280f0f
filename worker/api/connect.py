"""``connect``: joins a job on a running cluster and returns its session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.distributed as dist

from ...cpp_ext import _client
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition, not_allowed
from ...proto.schema import DTYPES, Dtype
from ...proto.security.security import Security, loaded_security
from ...proto.transport import TRANSPORTS, Transport
from ...proto.worker_identity import WorkerIdentity
from ..membership.fault_report import report_fault
from ..membership.lease import REPLAY_BYTES, Lease
from ..membership.shard_client import shard_client
from ..session.follower_core import FollowerCore
from ..session.mesh_place import place_in_mesh
from ..session.no_grad_rows import NO_GRAD_BYTES, no_grad_arguments
from ..session.participant import NonFinitePolicy
from ..session.quorum import check_quorum
from ..session.row_cache import RowCache, cache_arguments, check_cache
from ..session.session_core import SessionCore
from ..session.session_parts import Placement
from ..session.tensor_group import TensorGroup
from .session import Session

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PATIENCE_SEC = 20.0  # how long a coordinator that has answered before may be away
NamespacePolicy: TypeAlias = Literal["new", "continue"]


def connect(
    address: str,
    namespace: str = "default",
    *,
    job: str | None = None,
    staleness: int | None = 0,
    quorum: int | None = None,
    grad_scale: Literal["mean", "sum"] = "mean",
    wire_dtype: Dtype = "float32",
    deadline_sec: float = 30.0,
    gather_sec: float = 300.0,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
    on_nonfinite: NonFinitePolicy = "raise",
    cache: RowCache | None = None,
    namespace_policy: NamespacePolicy | None = None,
    no_grad_bytes: int = NO_GRAD_BYTES,
    no_grad_sec: float | None = None,
    transport: Transport = "auto",
    security: Security | str | Path | None = None,
) -> Session:
    """Joins a job on a cluster. Every rank calls it, and it returns when all ranks have joined.

    Args:
        address: ``HOST:PORT`` of the coordinator. When several coordinators elect a leader, all of their addresses,
            separated by commas.
        namespace: the namespace that holds the tables.
        job: the name of the job; the workers of one job share a clock. None takes the namespace's name.
        staleness: how many of the newest steps a pull may miss. 0: a step sees exactly the steps before it. k: at most
            k steps fewer. None: there is no clock, and no pull waits for another worker.
        quorum: the number of workers whose gradients make a step, with staleness 0 and dense tensors on the servers.
            The first ``quorum`` workers that are done with a step are its members. ``session.step`` of the others
            returns False, and their clock goes on with the next step that takes members. None: all workers.
        grad_scale: "mean" divides gradients by the number of workers of the step, as DDP does; "sum" does not.
        wire_dtype: the dtype of rows and gradients on the network. In 16 bits each row that is sent has an exponent of
            its own, so gradients of any magnitude train; a pulled row with values beyond the dtype is refused.
        deadline_sec: the deadline of each call to the servers, in seconds, including the wait for slower workers.
        gather_sec: how long to wait for the ranks that have not joined yet, in seconds.
        rank: this worker's rank. None takes that of ``torch.distributed`` when it is initialised, else 0.
        world_size: number of workers. None takes that of ``torch.distributed`` when it is initialised, else 1.
        mesh: a mesh over all ranks, in place of ``rank`` and ``world_size``. Its dimensions are named: data, dp, fsdp,
            replicate, shard, dp_replicate or dp_shard for data, tensor or tp for tensor parallelism. Ranks that differ
            in the tensor dimension alone are one worker: they read the same batch, and the first of them pulls, hands
            the rows to the others and commits. ``rank`` and ``world_size`` of the session count such groups. None:
            each rank is a worker.
        on_nonfinite: what ``session.step`` does with NaN or Inf when no scaler is given: "raise" or "skip".
        cache: the settings of a row cache in this process, which keeps rows for later steps; None: no cache.
        namespace_policy: what happens to tables that the namespace has before the job begins. "new" refuses them;
            "continue" goes on training their rows. None acts as "continue", and ``distribute`` on rank 0 logs one line
            about what it found. The coordinator decides once for all ranks that start a job together; workers that
            join a running job are not checked.
        no_grad_bytes: how many bytes of rows read under ``torch.no_grad`` in train mode a step keeps. Rows beyond it
            are dropped and read again at the same clock. 128 MiB by default.
        no_grad_sec: the age in seconds at which such rows are dropped too. None: 10 s; at staleness 0, no age limit.
        transport: how rows travel. "auto": through shared memory from each shard of this host and user, by TCP from all
            others, and with TLS. "tcp": by TCP alone. "shm": through shared memory alone; shards for which that is not
            possible are unreachable.
        security: certificates and token, or the path of their file (docs/security.md). None takes the settings of this
            process. The session follows the files as they change.

    Returns:
        The session, at the step that the job has reached.

    Raises:
        Unavailable: the coordinator or a shard cannot be reached, or the cluster is not complete yet.
        DeadlineExceeded: some ranks have not joined within ``gather_sec``; the text has the number that have.
        FailedPrecondition: another worker of the job gave another staleness, quorum, world size or grad_scale; or the
            cluster runs a build that knows no quorum; or the namespace has tables that ``namespace_policy="new"``
            refuses.
        InvalidArgument: an argument is out of its range, or the mesh has a dimension of another name.
    """
    _check(staleness, wire_dtype, on_nonfinite, transport, deadline_sec=deadline_sec, gather_sec=gather_sec)
    check_cache(cache, staleness)
    if namespace_policy not in (None, "new", "continue"):
        raise not_allowed("connect.namespace_policy", namespace_policy, "new, continue, None")
    no_grad = no_grad_arguments(no_grad_bytes, no_grad_sec, staleness)
    place = None if mesh is None else place_in_mesh(mesh)
    if place is not None:
        for name, given in (("rank", rank), ("world_size", world_size)):
            if given is not None:
                raise not_allowed(f"connect.{name}", given, "None beside mesh, which has it")
        rank, world_size = place.worker, place.workers
    placement = _placement(
        namespace, rank, world_size, staleness, quorum, grad_scale, on_nonfinite, cache, deadline_sec
    )
    check_quorum(placement, is_mesh=place is not None)
    join = partial(
        _joined,
        placement,
        address,
        job=namespace if job is None else job,
        wire_dtype=wire_dtype,
        deadline_sec=deadline_sec,
        gather_sec=gather_sec,
        namespace_policy=namespace_policy,
        no_grad=no_grad,
        transport=transport,
        security=security,
    )
    if place is None or place.group is None:
        return Session(join())
    return Session(_core_in_group(TensorGroup(place.group, place.tensor_rank), placement, join))


def _core_in_group(group: TensorGroup, placement: Placement, join: Callable[[], SessionCore]) -> SessionCore:
    """Joins on the leader, and returns on every rank of the group a core that is in the group."""
    made: list[SessionCore] = []

    def join_here() -> tuple[int, list[str]]:
        made.append(join())
        return made[0].native.step, made[0].origins

    try:
        first_step, origins = group.from_leader(join_here)
    except BaseException:
        for core in made:
            core.end()
        group.close()
        raise
    if not made:
        return FollowerCore(group, placement, first_step=first_step, origins=origins)
    made[0].tensor_group = group
    return made[0]


def _joined(
    placement: Placement,
    address: str,
    *,
    job: str,
    wire_dtype: Dtype,
    deadline_sec: float,
    gather_sec: float,
    namespace_policy: NamespacePolicy | None,
    no_grad: dict[str, Any],
    transport: Transport,
    security: Security | str | Path | None,
) -> SessionCore:
    """Joins the job as one worker; :func:`connect` has the arguments and the errors."""
    own = None if security is None else loaded_security(security)
    control = ControlClient(address, deadline_sec=deadline_sec, security=own)
    try:
        identity = control.register_worker(
            namespace=placement.namespace,
            job=job,
            rank=placement.rank,
            world_size=placement.world_size,
            staleness=placement.staleness,
            grad_scale=placement.grad_scale,
            deadline_sec=gather_sec,
            needs_new_namespace=namespace_policy == "new",
            quorum=placement.quorum,
        )
        lease = Lease(control, identity)
    except BaseException:
        control.close()
        raise
    if namespace_policy == "new" and identity.found is None:
        lease.end()
        raise FailedPrecondition(
            "connect.namespace_policy: this coordinator's version does not support 'new'; allowed: continue, None"
        )
    control.patience_sec = _PATIENCE_SEC  # the coordinator has answered: if it goes away now, it is being restarted
    try:
        shown = control.security
        cluster_id, client, native = _native_session(
            control, shown, identity, placement, wire_dtype, deadline_sec, no_grad, transport
        )
        lease.follow(native, client, deadline_sec, shown)
        joins = identity.first_step > 0
        reached = partial(_reached, control, identity.job_id) if joins else None
        peers = partial(_peers, control, lease, identity.job_id)
        return SessionCore(
            native,
            control,
            placement,
            on_close=lease.end,
            on_fault=partial(report_fault, control, identity),
            notes=lease,
            reached=reached,
            peers=peers,
            identity=identity,
            found_tables=identity.found if namespace_policy is None else None,
            cluster_id=cluster_id,
        )
    except BaseException as error:
        if isinstance(error, Exception):
            report_fault(control, identity, error)
        lease.end()
        raise


def _peers(control: ControlClient, lease: Lease, job_id: int) -> dict[int, int]:
    """Returns the steps of the workers that are in the job now, by rank, for a worker that may wait for one of them."""
    lease.note_wait()
    return {member.rank: member.step for job in control.status().jobs if job.job_id == job_id for member in job.members}


def _reached(control: ControlClient, job_id: int) -> int:
    """Returns the highest step that a worker of the job has committed; -1 before the first commit."""
    return max((job.highest_step for job in control.status().jobs if job.job_id == job_id), default=-1)


def _check(staleness: int | None, wire_dtype: str, on_nonfinite: str, transport: str, **seconds: float) -> None:
    if staleness is not None and (not isinstance(staleness, int) or not 0 <= staleness < 2**31):
        raise not_allowed("connect.staleness", staleness, "[0, 2**31), or None")
    if wire_dtype not in DTYPES:
        raise not_allowed("connect.wire_dtype", wire_dtype, DTYPES)
    for name, given in seconds.items():
        if not 0 < given <= 86400:
            raise not_allowed(f"connect.{name}", given, "(0, 86400]")
    if transport not in TRANSPORTS:
        raise not_allowed("connect.transport", transport, TRANSPORTS)
    if on_nonfinite not in ("raise", "skip"):
        raise not_allowed("connect.on_nonfinite", on_nonfinite, "raise, skip")


def _placement(
    namespace: str,
    rank: int | None,
    world_size: int | None,
    staleness: int | None,
    quorum: int | None,
    grad_scale: Literal["mean", "sum"],
    on_nonfinite: NonFinitePolicy,
    cache: RowCache | None,
    deadline_sec: float,
) -> Placement:
    is_group = dist.is_available() and dist.is_initialized()
    return Placement(
        namespace=namespace,
        rank=(dist.get_rank() if is_group else 0) if rank is None else rank,
        world_size=(dist.get_world_size() if is_group else 1) if world_size is None else world_size,
        staleness=staleness,
        grad_scale=grad_scale,
        on_nonfinite=on_nonfinite,
        cache=cache,
        deadline_sec=deadline_sec,
        quorum=quorum,
    )


def _native_session(
    control: ControlClient,
    security: Security,
    identity: WorkerIdentity,
    placement: Placement,
    wire_dtype: Dtype,
    deadline_sec: float,
    no_grad: dict[str, Any],
    transport: Transport,
) -> tuple[int, _client.Client, _client.NativeSession]:
    view = control.cluster()
    client = shard_client(
        view,
        security,
        identity,
        wire_dtype=wire_dtype,
        replay_bytes=0 if placement.staleness == 0 else REPLAY_BYTES,
        has_quorum=placement.quorum is not None,
        transport=transport,
    )
    native = _client.NativeSession(
        client.shards,
        first_step=identity.first_step,
        first_sequence=1,
        clocked=placement.staleness is not None,
        grad_sum=placement.grad_scale == "sum",
        deadline_ms=round(deadline_sec * 1000),
        **cache_arguments(placement.cache),
        **no_grad,
    )
    return view.cluster_id, client, native
