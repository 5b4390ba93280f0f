"""``connect``: a session with a running cluster."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Literal

import numpy as np
import torch.distributed as dist

from ..cpp_ext import _client
from ..proto import control_pb2 as pb
from ..proto.control import ControlClient, WorkerIdentity
from ..proto.errors import InvalidArgument, SparserowError
from ..proto.schema import DTYPES, Dtype
from .cache.settings import RowCache, cache_arguments, check_cache
from .session import NonFinitePolicy, Placement, Session

_log = logging.getLogger(__name__)

_REPLAY_BYTES = 32 << 20  # of commits that each shard may get again; the newest in any case
_TOUCH_SEC = 5.0


def connect(
    address: str,
    namespace: str = "default",
    *,
    job: str | None = None,
    staleness: int | None = 0,
    grad_scale: Literal["mean", "sum"] = "mean",
    wire_dtype: Dtype = "float32",
    deadline_sec: float = 30.0,
    rank: int | None = None,
    world_size: int | None = None,
    on_nonfinite: NonFinitePolicy = "raise",
    cache: RowCache | None = None,
) -> Session:
    """Joins a job on a cluster; every rank calls it, and it returns when all have come.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        namespace: of the tables.
        job: workers of one job share a clock; None is the namespace's name.
        staleness: 0: a step sees exactly the steps before it. k: at most k steps fewer. None: no clock.
        grad_scale: "mean" divides gradients by the number of workers, as DDP does; "sum" does not.
        wire_dtype: of rows and gradients on the network.
        deadline_sec: of each call to the servers, waiting for slower workers included.
        rank, world_size: None takes those of ``torch.distributed`` when it is initialised, else 0 and 1.
        on_nonfinite: what ``session.step`` does with NaN or Inf when no scaler is given: "raise" or "skip".
        cache: keeps rows here for later steps; None: none.

    Raises:
        Unavailable: the coordinator or a shard cannot be reached, or the cluster is not complete yet.
        DeadlineExceeded: not every rank has come (says how many have).
        FailedPrecondition: another worker of the job gave another staleness, world size or grad_scale.
        InvalidArgument: an argument is out of its range.
    """
    _check(staleness, wire_dtype, deadline_sec, on_nonfinite)
    check_cache(cache, staleness)
    placement = _placement(namespace, rank, world_size, staleness, grad_scale, on_nonfinite, cache)
    control = ControlClient(address, deadline_sec=deadline_sec)
    try:
        identity = control.register_worker(
            namespace=namespace,
            job=namespace if job is None else job,
            rank=placement.rank,
            world_size=placement.world_size,
            staleness=staleness,
            grad_scale=grad_scale,
        )
        lease = Lease(control, identity)
    except BaseException:
        control.close()
        raise
    try:
        client, native = _native_session(control, identity, placement, wire_dtype, deadline_sec)
        lease.follow(native, client, deadline_sec)
        joins = identity.first_step > 0
        reached = partial(_reached, control, identity.job_id) if joins else None
        ranks = partial(_ranks, control, identity.job_id)
        return Session(native, control, placement, on_close=lease.end, reached=reached, ranks=ranks, identity=identity)
    except BaseException:
        lease.end()
        raise


def _ranks(control: ControlClient, job_id: int) -> list[int]:
    """Of the workers that are in the job."""
    return [member.rank for job in control.status().jobs if job.job_id == job_id for member in job.members]


def _reached(control: ControlClient, job_id: int) -> int:
    """The highest step that a worker of the job has committed; -1 before the first."""
    return max((job.highest_step for job in control.status().jobs if job.job_id == job_id), default=-1)


def _check(staleness: int | None, wire_dtype: str, deadline_sec: float, on_nonfinite: str) -> None:
    if staleness is not None and (not isinstance(staleness, int) or not 0 <= staleness < 2**31):
        raise InvalidArgument(f"connect.staleness: {staleness!r} is not allowed; allowed: [0, 2**31), or None")
    if wire_dtype not in DTYPES:
        raise InvalidArgument(f"connect.wire_dtype: {wire_dtype!r} is not allowed; allowed: {', '.join(DTYPES)}")
    if not 0 < deadline_sec <= 86400:
        raise InvalidArgument(f"connect.deadline_sec: {deadline_sec!r} is not allowed; allowed: (0, 86400]")
    if on_nonfinite not in ("raise", "skip"):
        raise InvalidArgument(f"connect.on_nonfinite: {on_nonfinite!r} is not allowed; allowed: raise, skip")


def _placement(
    namespace: str,
    rank: int | None,
    world_size: int | None,
    staleness: int | None,
    grad_scale: Literal["mean", "sum"],
    on_nonfinite: NonFinitePolicy,
    cache: RowCache | None,
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
    )


def _native_session(
    control: ControlClient, identity: WorkerIdentity, placement: Placement, wire_dtype: Dtype, deadline_sec: float
) -> tuple[_client.Client, _client.NativeSession]:
    view = control.cluster()
    client = _client.Client(
        shards=[(shard.host, shard.port) for shard in view.shards],
        slot_owner=np.ascontiguousarray(view.slot_owner, dtype=np.uint16),
        route_epoch=view.route_epoch,
        cluster_id=view.cluster_id,
        namespace_id=identity.namespace_id,
        job_id=identity.job_id,
        worker_id=identity.worker_id,
        worker_epoch=identity.epoch,
        wire_dtype=wire_dtype,
        replay_bytes=0 if placement.staleness == 0 else _REPLAY_BYTES,
    )
    native = _client.NativeSession(
        client.shards,
        first_step=identity.first_step,
        first_sequence=1,
        clocked=placement.staleness is not None,
        grad_sum=placement.grad_scale == "sum",
        deadline_ms=round(deadline_sec * 1000),
        **cache_arguments(placement.cache),
    )
    return client, native


class Lease:
    """Keeps a worker in its job: a daemon thread renews the lease every third of it.

    A coordinator that cannot be reached is tried again; an epoch that is over ends the thread, and the session's
    next call to a shard is refused as Fenced.
    """

    def __init__(self, control: ControlClient, identity: WorkerIdentity) -> None:
        self._control = control
        self._identity = identity
        self._native: _client.NativeSession | None = None
        self._client: _client.Client | None = None
        self._deadline_sec = 0.0
        self._restores = 0  # of shards, that the client knows of
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sparserow-lease", daemon=True)
        self._thread.start()

    def follow(self, native: _client.NativeSession, client: _client.Client, deadline_sec: float) -> None:
        """Heartbeats carry this session's step from now on; while they say that a shard is being restored, calls have
        their deadline anew, and a shard that is back gets what the client holds for it.
        """
        self._deadline_sec, self._client = deadline_sec, client
        self._native = native

    def end(self) -> None:
        """Stops renewing, leaves the job and closes the connection; a coordinator that is gone is not waited for."""
        self._ended.set()
        self._thread.join(timeout=self._identity.lease_sec)
        try:
            self._control.deregister_worker(self._identity)
        except SparserowError as error:
            _log.warning("leaving the job: %s", error)
        finally:
            self._control.close()

    def _attend(self, reply: pb.WorkerHeartbeatReply) -> None:
        client = self._client
        if client is None:
            return
        if reply.restoring or reply.shard_restores != self._restores:
            client.extend(grace_ms=round(1000 * (self._deadline_sec + self._identity.lease_sec)))
        if reply.shard_restores != self._restores:
            client.touch(deadline_ms=round(1000 * min(_TOUCH_SEC, self._identity.lease_sec / 2)))
            self._restores = reply.shard_restores

    def _renew(self) -> None:
        while not self._ended.wait(self._identity.lease_sec / 3):
            try:
                step = None if self._native is None else self._native.step
                self._attend(self._control.heartbeat_worker(self._identity, step=step))
            except SparserowError as error:
                if not error.retryable and error.code == "Fenced":
                    _log.error("this worker has lost its place in the job: %s", error)
                    return
                _log.warning("heartbeat: %s", error)
