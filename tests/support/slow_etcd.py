"""What a coordinator asks of etcd, over real gRPC, with writes of the state that can be held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from sparserow.proto import etcd_pb2 as pb, etcd_pb2_grpc as pb_grpc


class SlowEtcd(pb_grpc.KVServicer, pb_grpc.LeaseServicer):
    """Listens on loopback; leases end by ``end_lease`` alone.

    Attributes:
        url: for ``--state``.
        writes: is clear while writes of the state are held up.
        waiting: is set once one is held up.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, pb.KeyValue] = {}
        self._lock = threading.Lock()
        self._revision = 0
        self.writes, self.waiting = threading.Event(), threading.Event()
        self.writes.set()
        self._is_over = False
        self._server = grpc.server(ThreadPoolExecutor(16))
        pb_grpc.add_KVServicer_to_server(self, self._server)
        pb_grpc.add_LeaseServicer_to_server(self, self._server)
        self.url = f"etcd://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}/tests/slow"
        self._server.start()

    def close(self) -> None:
        """Stops listening."""
        self.writes.set()
        self._server.stop(None)

    def end_lease(self) -> None:
        """The leader's lease ends, and with it the seat; the next lease lasts again."""
        self.LeaseRevoke(pb.LeaseRevokeRequest(), None)
        self._is_over = True

    def Txn(self, request: pb.TxnRequest, context: grpc.ServicerContext) -> pb.TxnResponse:
        for operation in request.success:
            if operation.WhichOneof("request") == "request_put" and operation.request_put.key.endswith(b"/state"):
                while not self.writes.is_set():
                    self.waiting.set()
                    if not context.is_active():
                        return pb.TxnResponse()
                    self.writes.wait(0.05)
        with self._lock:
            holds = all(self._created(compare.key) == compare.create_revision for compare in request.compare)
            done = [self._do(each) for each in (request.success if holds else request.failure)]
        return pb.TxnResponse(succeeded=holds, responses=done)

    def _created(self, key: bytes) -> int:
        return self._values[key].create_revision if key in self._values else 0

    def _do(self, operation: pb.RequestOp) -> pb.ResponseOp:
        if operation.WhichOneof("request") == "request_range":
            found = [self._values[operation.request_range.key]] if operation.request_range.key in self._values else []
            return pb.ResponseOp(response_range=pb.RangeResponse(kvs=found))
        put = operation.request_put
        self._revision += 1
        created = self._created(put.key) or self._revision
        self._values[put.key] = pb.KeyValue(key=put.key, value=put.value, create_revision=created, lease=put.lease)
        return pb.ResponseOp(response_put=pb.PutResponse())

    def LeaseGrant(self, request: pb.LeaseGrantRequest, _: Any) -> pb.LeaseGrantResponse:
        self._is_over = False
        return pb.LeaseGrantResponse(ID=7, TTL=request.TTL)

    def LeaseRevoke(self, _request: pb.LeaseRevokeRequest, _: Any) -> pb.LeaseRevokeResponse:
        with self._lock:
            self._values = {key: value for key, value in self._values.items() if not value.lease}
        return pb.LeaseRevokeResponse()

    def LeaseKeepAlive(
        self, requests: Iterator[pb.LeaseKeepAliveRequest], _: Any
    ) -> Iterator[pb.LeaseKeepAliveResponse]:
        for request in requests:
            yield pb.LeaseKeepAliveResponse(ID=request.ID, TTL=0 if self._is_over else 60)
