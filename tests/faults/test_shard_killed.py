"""Training dies while serving follows it. A shard that is killed comes back with the rows of a checkpoint, and serving
goes back with it. When the whole cluster is killed serving goes on answering; when another one with a restored
checkpoint stands in its place, serving follows that. No serving process is restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest

import sparserow as sr
from sparserow.proto import serving_pb2, serving_pb2_grpc
from sparserow.proto.control import ControlClient
from sparserow_process import free_port, wait_until

pytestmark = pytest.mark.started

DIM = 4
KEYS = np.arange(600, dtype=np.uint64)
ALL = np.arange(1200, dtype=np.uint64)


def make_table(session: sr.Session) -> sr.TableRows:
    return session.create_table("user", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1), init=sr.Uniform(-1, 1), seed=5)


def kill_shard(cluster: sr.LocalCluster, index: int) -> None:
    def pid() -> int:
        with ControlClient(cluster.address) as control:
            return control.status().shards[index].pid

    before = pid()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: pid() != before, "another process of the shard")


def equals(client: sr.ServingClient, table: sr.TableRows) -> bool:
    served = client.lookup("user", ALL, deadline_ms=5000)
    there = {int(key) for keys, _ in table.scan() for key in keys}
    wanted = np.array([int(key) in there for key in ALL])
    return bool(served.answered.all() and (served.found == wanted).all() and (served.rows == table.pull(ALL)).all())


def problems(address: str) -> str:
    with grpc.insecure_channel(address) as channel:
        reply = serving_pb2_grpc.ServingStub(channel).Describe(serving_pb2.DescribeRequest(), timeout=60)
    return "; ".join(version.problem for version in reply.versions)


class Lookups:
    """A client that keeps asking, and notes what was not whole."""

    def __init__(self, client: sr.ServingClient) -> None:
        self._client, self._stop = client, threading.Event()
        self.count, self.failures = 0, []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            try:
                found = self._client.lookup("user", KEYS, deadline_ms=10_000)
                if found.is_partial:
                    self.failures.append(f"partial: {found.errors}")
                self.count += 1
            except sr.errors.SparserowError as error:
                self.failures.append(repr(error))

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def test_serving_goes_over_to_the_restored_cluster(tmp_path: Path) -> None:
    port, root, checkpoint = free_port(), str(tmp_path / "models"), str(tmp_path / "ckpt")
    rng = np.random.default_rng(2)
    with contextlib.ExitStack() as stack:
        with (
            contextlib.suppress(sr.errors.SparserowError),  # of the dead cluster, at the end of the block
            sr.local_cluster(shards=2, port=port) as cluster,
            sr.connect(cluster.address, "ads", staleness=None) as session,
        ):
            table = make_table(session)
            table.assign(KEYS, rng.standard_normal((len(KEYS), DIM), np.float32))
            session.publish("ctr", root=root)
            follow = {"follow": cluster.address, "sync_interval": "20ms", "poll": "50ms"}
            live = stack.enter_context(sr.local_serving("now", namespace="ads", **follow))
            published = stack.enter_context(sr.local_serving("ctr", root=root, **follow))
            clients = [
                stack.enter_context(sr.ServingClient(serving.addresses, refresh_sec=0.1))
                for serving in (live, published)
            ]
            session.save(checkpoint)
            table.push(KEYS, rng.standard_normal((len(KEYS), DIM)).astype(np.float32))
            table.assign(ALL[600:900], rng.standard_normal((300, DIM), np.float32))
            table.delete(KEYS[:100])
            for client in clients:
                wait_until(lambda client=client: equals(client, table), "live sync before the fault")
            lookups = [Lookups(client) for client in clients]
            stack.callback(lambda: [each.end() for each in lookups])
            kill_shard(cluster, 1)  # it comes back alone, with the rows of the checkpoint and another lineage
            for client in clients:
                wait_until(lambda client=client: equals(client, table), "the rows of the shard that came back")
            table.push(KEYS[200:], rng.standard_normal((400, DIM)).astype(np.float32))
            table.delete(KEYS[300:350])
            for client in clients:
                wait_until(lambda client=client: equals(client, table), "live sync after that")
            os.kill(cluster.pid, signal.SIGKILL)  # and now all of it
            wait_until(lambda: problems(live.addresses[0]), "the loss to be noticed")
        for each in lookups:
            asked = each.count
            wait_until(lambda each=each, asked=asked: each.count > asked + 3, "lookups while training is down")
        with (
            sr.local_cluster(shards=3, port=port) as cluster,
            sr.connect(cluster.address, "ads", staleness=None) as session,
        ):
            table = make_table(session)
            session.restore(checkpoint)
            assert sum(len(keys) for keys, _ in table.scan()) == len(KEYS)
            wait_until(lambda: equals(clients[0], table), "the restored rows, without a version")
            wait_until(lambda: "was trained by cluster" in problems(published.addresses[0]), "the other cluster")
            session.publish("ctr", root=root)
            wait_until(lambda: clients[1].version == 2, "the version of the restored rows")
            for _ in range(3):
                table.push(KEYS[:300], rng.standard_normal((300, DIM)).astype(np.float32))
                table.assign(ALL[900:], rng.standard_normal((300, DIM), np.float32))
                table.delete(KEYS[500:])
                for client in clients:
                    wait_until(lambda client=client: equals(client, table), "live sync after the restore")
            for each in lookups:
                each.end()
                assert each.failures == []
