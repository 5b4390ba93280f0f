"""A worker's place in its job, for as long as it lives. Without torch: the gateway has one too."""

from __future__ import annotations

import logging
import threading

from ...cpp_ext import _client
from ...proto import control_pb2 as pb
from ...proto.control import ControlClient, WorkerIdentity
from ...proto.errors import SparserowError

_log = logging.getLogger(__name__)

REPLAY_BYTES = 32 << 20  # of commits that each shard may get again; the newest in any case

_TOUCH_SEC = 5.0


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
        self._processes = 0  # hash of the shards' processes that the client knows of; 0: of none
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sparserow-lease", daemon=True)
        self._thread.start()

    def follow(self, native: _client.NativeSession, client: _client.Client, deadline_sec: float) -> None:
        """Heartbeats carry this session's step from now on; while they say that a shard is being restored, calls have
        their deadline anew, and a shard that is back gets what the client holds for it. Where they say that the job
        cannot go on, calls end at once.
        """
        self._deadline_sec, self._client = deadline_sec, client
        self._native = native

    def end(self, deadline_sec: float | None = None) -> None:
        """Stops renewing, leaves the job and closes the connection; a coordinator that is gone is not waited for.

        Args:
            deadline_sec: of leaving; None: the connection's.
        """
        self._ended.set()
        patience_sec = self._identity.lease_sec
        self._thread.join(timeout=patience_sec if deadline_sec is None else min(patience_sec, deadline_sec))
        try:
            self._control.deregister_worker(self._identity, deadline_sec=deadline_sec)
        except SparserowError as error:
            _log.warning("leaving the job: %s", error)
        finally:
            self._control.close()

    def _attend(self, reply: pb.WorkerHeartbeatReply) -> None:
        """Raises SparserowError while a shard that came back cannot be asked."""
        client = self._client
        if client is None:
            return
        if reply.over:
            client.end(f"{reply.over}; connect anew when the job has ended, and restore a checkpoint")
        if reply.restoring:
            client.extend(grace_ms=round(1000 * (self._deadline_sec + self._identity.lease_sec)))
        if reply.shard_processes not in (0, self._processes):
            # One may have come back on another machine. While others are away there is no answer: heartbeats go on.
            for shard in self._control.cluster(once_sec=self._identity.lease_sec / 3).shards:
                client.move(shard.index, shard.host, shard.port)
            client.touch(deadline_ms=round(1000 * min(_TOUCH_SEC, self._identity.lease_sec / 2)))
            self._processes = reply.shard_processes

    def _renew(self) -> None:
        reached, asked = True, True
        while not self._ended.wait(self._identity.lease_sec / 3):
            try:
                step = None if self._native is None else self._native.step
                reply = self._control.heartbeat_worker(self._identity, step=step)
            except SparserowError as error:
                if not error.retryable and error.code == "Fenced":
                    _log.error("this worker has lost its place in the job: %s", error)
                    return
                if reached:
                    _log.warning("heartbeat: %s; training goes on, and tries again until it is back", error)
                reached = False
                continue
            if not reached:
                _log.warning("the coordinator is back")
            reached = True
            try:
                self._attend(reply)
                asked = True
            except SparserowError as error:
                if asked:
                    _log.warning("a shard cannot be asked at its place: %s; tried again until it can", error)
                asked = False
