"""A coordinator's candidacy in etcd: one of several leads, and only the leader can write the cluster's state.

The leader's key ends with the leader's lease. Each write of the state is a transaction that checks that this key is
still the one of the election. So a leader that was held up beyond its lease can write nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from ....proto import etcd_pb2 as pb, etcd_pb2_grpc as pb_grpc
from ....proto.coordinators import parse_address
from ....proto.errors import (
    DataLoss,
    InvalidArgument,
    ResourceExhausted,
    SparserowError,
    Unavailable,
)
from ....proto.grpc_status import NotLeader
from ....proto.security.channels import SecureChannel
from ....proto.security.security import process_security

_CALL_SEC = 1.0
_LARGEST_STATE = 1_400_000  # bytes; etcd's default bound on requests is 1.5 MiB
_SCHEMES = ("etcd", "etcds")


class EtcdAddress:
    """The place of a cluster's state: ``etcd://HOST:PORT[,HOST:PORT]/PREFIX``, or ``etcds`` with TLS.

    Args:
        url: the URL.

    Raises:
        InvalidArgument: ``url`` does not have that form.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        hosts, _, prefix = rest.partition("/")
        if scheme not in _SCHEMES or not hosts or not prefix.strip("/"):
            raise InvalidArgument(
                f"--state {url}: is not allowed; allowed: a file, or etcd://HOST:PORT[,HOST:PORT]/PREFIX (etcds: TLS)"
            )
        self.url, self.is_tls = url, scheme == "etcds"
        self.endpoints = tuple(hosts.split(","))
        for endpoint in self.endpoints:
            parse_address(endpoint, what="--state")
        if self.is_tls and not process_security().authorities:
            raise InvalidArgument(f"--state {url}: needs --security with the authority of etcd's certificate")
        prefix = prefix.strip("/")
        self.leader_key, self.state_key = f"/{prefix}/leader".encode(), f"/{prefix}/state".encode()


class EtcdSeat:
    """The candidacy of one coordinator. A thread asks for the lead and keeps it. It has to be closed.

    Args:
        place: the place of the cluster's state.
        address: ``HOST:PORT`` under which clients reach this coordinator.
        ttl_sec: the silence in whole seconds after which another coordinator may lead; etcd needs at least 2.
        on_change: called in the thread whenever this coordinator begins or ceases to lead.

    Attributes:
        leader: the address of the leader as last seen; empty when there is none.
        problem: why etcd could not be asked; empty while it can be.
    """

    def __init__(self, place: EtcdAddress, address: str, ttl_sec: int, on_change: Callable[[], None]) -> None:
        self._place, self._address, self._ttl_sec, self._on_change = place, address, ttl_sec, on_change
        self._channels = [SecureChannel(each, has_token=False, is_tls=place.is_tls) for each in place.endpoints]
        self._at = 0
        self._term = 0  # create revision of the own leader key; 0: another coordinator leads, or none
        self._until = 0.0  # monotonic; this coordinator leads until then, whatever happens
        self.leader = ""  # as last seen; empty: none
        self.problem = ""  # why etcd could not be asked; empty while it can
        self._lease = 0
        self._is_over = False  # whether the lease's term has ended; the next term needs another lease
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="sparserow-seat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives up the lead, so that another coordinator leads at once."""
        self._closing.set()
        self._thread.join(self._ttl_sec + _CALL_SEC)
        for channel in self._channels:
            channel.close()

    @property
    def term(self) -> int:
        """The number of the term in which this coordinator leads now; 0 when it does not lead."""
        return self._term if time.monotonic() < self._until else 0

    def check(self, term: int) -> None:
        """Raises NotLeader unless this coordinator leads in ``term``."""
        if not term or self.term != term:
            where = f"the leader is {self.leader}" if self.leader and self.leader != self._address else "no leader yet"
            raise NotLeader(
                f"coordinator {self._address} is not the leader; {self.problem or where}",
                self.leader if self.leader != self._address else "",
            )

    def load(self, term: int) -> Any:
        """Returns the document of the state; None when there is none yet.

        Raises:
            NotLeader: this coordinator does not lead in ``term``.
            DataLoss: the stored value is not JSON.
        """
        done = self._transact(term, pb.RequestOp(request_range=pb.RangeRequest(key=self._place.state_key)))
        values = [pair.value for pair in done.responses[0].response_range.kvs]
        try:
            return json.loads(values[0]) if values else None
        except ValueError as error:
            raise DataLoss(f"--state {self._place.url}: the stored state is not JSON: {error}") from None

    def save(self, term: int, document: dict[str, Any]) -> None:
        """Replaces the document, which etcd has when this returns. While etcd is away, this waits as long as the term
        lasts.

        Raises:
            NotLeader: this coordinator does not lead in ``term``, or no longer; the document is not replaced.
            ResourceExhausted: the document is larger than etcd accepts.
        """
        value = json.dumps(document, separators=(",", ":")).encode()
        if len(value) > _LARGEST_STATE:
            raise ResourceExhausted(
                f"--state {self._place.url}: the state has {len(value)} bytes; allowed: at most {_LARGEST_STATE}, "
                f"which etcd accepts"
            )
        put = pb.PutRequest(key=self._place.state_key, value=value)
        self._transact(term, pb.RequestOp(request_put=put))

    def _transact(self, term: int, operation: pb.RequestOp) -> pb.TxnResponse:
        """Runs an operation if this coordinator leads in ``term`` at that moment; retries while it leads."""
        mine = pb.Compare(target=pb.Compare.CREATE, key=self._place.leader_key, create_revision=term)
        while True:
            self.check(term)
            try:
                done = self._call("KV", "Txn", pb.TxnRequest(compare=[mine], success=[operation]))
            except Unavailable:
                time.sleep(0.05)
                continue
            if not done.succeeded:
                self._lose()
                self.check(term)
            return done

    # ---- the thread

    def _keep(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._ask(began)
                self.problem = ""
            except SparserowError as error:
                self.problem = str(error)
            if self._term and time.monotonic() >= self._until:
                self._lose()
            self._closing.wait(max(0.0, began + self._ttl_sec / 6 - time.monotonic()))
        self._lose()
        if self._lease:
            with contextlib.suppress(SparserowError):
                self._call("Lease", "LeaseRevoke", pb.LeaseRevokeRequest(ID=self._lease))

    def _ask(self, began: float) -> None:
        """Makes one round: renews the lease, and asks for the lead where it is free."""
        if self._lease and not self._renewed():
            self._lose()
            self._lease = 0
        if self._is_over and self._lease:
            self._call("Lease", "LeaseRevoke", pb.LeaseRevokeRequest(ID=self._lease))
            self._lease = 0
        if not self._lease:
            self._lease = self._call("Lease", "LeaseGrant", pb.LeaseGrantRequest(TTL=self._ttl_sec)).ID
        self._is_over = False
        if self._term:
            self._until = began + self._ttl_sec
            return
        key = self._place.leader_key
        vacant = pb.Compare(target=pb.Compare.CREATE, key=key, create_revision=0)
        put = pb.PutRequest(key=key, value=self._address.encode(), lease=self._lease)
        look = pb.RequestOp(request_range=pb.RangeRequest(key=key))
        done = self._call(
            "KV", "Txn", pb.TxnRequest(compare=[vacant], success=[pb.RequestOp(request_put=put), look], failure=[look])
        )
        pairs = done.responses[-1].response_range.kvs
        self.leader = pairs[0].value.decode() if pairs else ""
        if pairs and pairs[0].lease == self._lease:  # true also when the answer to an earlier request was lost
            self._term, self._until = pairs[0].create_revision, began + self._ttl_sec
            self._on_change()

    def _renewed(self) -> bool:
        replies = self._call("Lease", "LeaseKeepAlive", pb.LeaseKeepAliveRequest(ID=self._lease))
        return any(reply.TTL > 0 for reply in replies)

    def _lose(self) -> None:
        led, self._term, self._until = self._term, 0, 0.0
        if led:
            self._is_over, self.leader = True, ""
            self._on_change()

    def _call(self, service: str, method: str, request: Any) -> Any:
        """Makes one call to the endpoint that answered last, or to the next one that answers.

        Raises:
            Unavailable: no endpoint answers.
            ResourceExhausted: etcd has no room.
        """
        problem = ""
        for turn in range(len(self._channels)):
            at = (self._at + turn) % len(self._channels)
            call = getattr(getattr(pb_grpc, f"{service}Stub")(self._channels[at]), method)
            try:
                if method == "LeaseKeepAlive":  # a stream in both directions
                    reply = list(call(iter([request]), timeout=_CALL_SEC))
                else:
                    reply = call(request, timeout=_CALL_SEC)
                self._at = at
                return reply
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise ResourceExhausted(f"--state {self._place.url}: {error.details()}") from None
                problem = f"etcd at {self._place.endpoints[at]}: {error.code().name}: {error.details()}"
        raise Unavailable(problem)
