"""Keeps a worker's place in its job as long as the process lives. It needs no torch, as the gateway uses it too."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from ...cpp_ext import _client
from ...proto import control_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import SparserowError
from ...proto.request_names import MOST_NAME
from ...proto.security.security import Security
from ...proto.worker_identity import WorkerIdentity
from .worker_notes import WorkerNotes

_log = logging.getLogger(__name__)

REPLAY_BYTES = 32 << 20  # bytes of commits kept for each shard to send again; the newest commit is always kept

_TOUCH_SEC = 5.0


class Lease(WorkerNotes):
    """Keeps a worker in its job: a daemon thread renews the lease after each third of its duration.

    The thread tries again when the coordinator cannot be reached. It ends when the worker's epoch is over; the
    session's next call to a shard is then refused as Fenced.

    Args:
        control: the client of the coordinator; :meth:`end` closes it.
        identity: this worker's ids in the cluster.
    """

    def __init__(self, control: ControlClient, identity: WorkerIdentity) -> None:
        self._control = control
        self._identity = identity
        self._native: _client.NativeSession | None = None
        self._client: _client.Client | None = None
        self._shown: dict[str, Any] = {}  # the certificates and the token that the client shows
        self._deadline_sec = 0.0
        self._worked_at = -math.inf  # when :meth:`note_work` was called last
        self._waited_at = -math.inf  # when :meth:`note_wait` was called last
        self._trained = (0, 0, 0.0)  # samples, those whose losses are numbers, and the sum of these losses
        self._auc = math.nan
        self._tested = ("", math.nan)  # the metric of the last test, and its value
        self._processes = 0  # a hash of the shards' processes to which the client is connected; 0: not known yet
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sparserow-lease", daemon=True)
        self._thread.start()

    def follow(
        self, native: _client.NativeSession, client: _client.Client, deadline_sec: float, security: Security
    ) -> None:
        """Attaches a session, so that heartbeats report its step and their replies reach its client.

        The client shows the certificates and the token that the control plane's client has then, as it follows their
        files.

        While a reply says that a shard is being restored, or that another worker is busy, the deadlines of calls are
        extended. A shard that is back gets the commits that the client keeps for it. When a reply says that the job
        cannot go on, calls end at once.

        Args:
            native: the session whose step heartbeats report.
            client: the client of the shards.
            deadline_sec: the deadline of the session's calls, in seconds.
            security: what the client shows now.
        """
        self._shown = security.native_client()
        self._deadline_sec, self._client = deadline_sec, client
        self._native = native

    def note_work(self, is_on: bool) -> None:
        """Has heartbeats say that this worker is busy, so that the others of its job wait for its steps.

        They say it until the session's deadline has passed since the last call, so one that hangs is not waited for.

        Args:
            is_on: whether it is at work; False ends it.
        """
        self._worked_at = time.monotonic() if is_on else -math.inf

    def note_wait(self) -> None:
        """Has the heartbeats of a lease say that this worker waits for another one of its job."""
        self._waited_at = time.monotonic()

    def note_trained(self, samples: int, loss_sum: float) -> None:
        """Adds samples that were trained on, and the sum of their losses, which may be not finite."""
        before, is_number = self._trained, math.isfinite(loss_sum)
        measured = before[1] + samples if is_number else before[1]
        # At once, because another thread reads all three.
        self._trained = (before[0] + samples, measured, before[2] + loss_sum if is_number else before[2])

    def note_auc(self, auc: float) -> None:
        """Notes the AUC of recent samples, each predicted before it was trained on; NaN: it has none."""
        self._auc = auc

    def note_test(self, metric: str, value: float) -> None:
        """Notes the result of the last test: the name of a metric, and its value."""
        self._tested = (metric[:MOST_NAME], value)

    def end(self, deadline_sec: float | None = None) -> None:
        """Stops the renewals, leaves the job and closes the connection.

        When the coordinator cannot be reached, the failure is only logged.

        Args:
            deadline_sec: how long leaving the job may take, in seconds; None: the deadline of the connection.
        """
        self._ended.set()
        patience_sec = self._identity.lease_sec
        self._thread.join(timeout=patience_sec if deadline_sec is None else min(patience_sec, deadline_sec))
        try:
            acknowledged = () if self._client is None else self._client.acknowledged_commits()
            self._control.deregister_worker(self._identity, acknowledged=acknowledged, deadline_sec=deadline_sec)
        except SparserowError as error:
            _log.warning("leaving the job: %s", error)
        finally:
            self._control.close()

    def _show_secrets(self) -> None:
        shown = self._control.security.native_client()
        if self._client is not None and shown != self._shown:
            self._shown = shown
            try:
                self._client.show(**shown)
            except SparserowError as error:  # no reason to miss a heartbeat
                _log.error("the connections to shards keep their former secrets: %s", error)

    def _attend(self, reply: pb.WorkerHeartbeatReply) -> None:
        """Acts on the reply to a heartbeat: ends calls, extends their deadlines, or reconnects to shards.

        Raises:
            SparserowError: a shard that came back cannot be reached yet.
        """
        client = self._client
        if client is None:
            return
        if reply.over:
            client.end(f"{reply.over}; connect anew when the job has ended, and restore a checkpoint")
        if reply.restoring or reply.peer_busy:
            client.extend(grace_ms=round(1000 * (self._deadline_sec + self._identity.lease_sec)))
        if reply.shard_processes not in (0, self._processes):
            # A shard may be back on another machine. While other shards are away this raises, and heartbeats go on.
            for shard in self._control.cluster(once_sec=self._identity.lease_sec / 3).shards:
                client.move(shard.index, shard.host, shard.port)
            client.touch(deadline_ms=round(1000 * min(_TOUCH_SEC, self._identity.lease_sec / 2)))
            self._processes = reply.shard_processes

    def _figures(self) -> pb.TrainingFigures:
        samples, measured, loss_sum = self._trained
        metric, value = self._tested
        auc = None if math.isnan(self._auc) else self._auc
        return pb.TrainingFigures(
            samples=samples, measured=measured, loss_sum=loss_sum, auc=auc, test_metric=metric, test_value=value
        )

    def _renew(self) -> None:
        reached, asked = True, True
        while not self._ended.wait(self._identity.lease_sec / 3):
            self._control.identity.look()
            self._show_secrets()
            try:
                step = None if self._native is None else self._native.step
                busy = time.monotonic() - self._worked_at < self._deadline_sec
                waits = time.monotonic() - self._waited_at < self._identity.lease_sec
                reply = self._control.heartbeat_worker(
                    self._identity, step=step, busy=busy, waits=waits, figures=self._figures()
                )
            except ValueError:  # the channel was closed meanwhile
                if self._ended.is_set():
                    return
                raise
            except SparserowError as error:
                if not error.retryable and error.code == "Fenced":
                    _log.error("this worker has lost its place in the job: %s", error)
                    return
                if reached:
                    _log.warning("heartbeat: %s; training goes on, and heartbeats are tried again", error)
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
                    _log.warning("a shard cannot be reached: %s; it is tried again", error)
                asked = False
