"""Serving processes as a pool: any of them answers for every key, canaries get their share, an alias moves under full
load, and what does not answer in time leaves a partial result."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import urllib.error
import urllib.request

import grpc
import numpy as np
import pytest

import sparserow as sr
from sparserow.proto import serving_pb2, serving_pb2_grpc
from sparserow.proto.published.registry import ModelRegistry
from sparserow_process import Launcher, Process, free_port, wait_until

DIM = 4
KEYS = np.arange(1, 301, dtype=np.uint64)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Versions 1 and 2 of a model; a row of the second is larger by 1."""
    root = str(tmp_path_factory.mktemp("models"))
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD())
        for version in (1, 2):
            table.assign(KEYS, rows_of(version))
            session.publish("ctr", root=root, alias="live" if version == 1 else None)
    return root


def rows_of(version: int) -> np.ndarray:
    return np.repeat(KEYS[:, None], DIM, axis=1).astype(np.float32) + version


def serve(launcher: Launcher, root: str, port: int, *arguments: str) -> Process:
    named = (f"--root={root}", "--model=ctr", "--poll=50ms", "--grace=5s", f"--port={port}")
    return launcher.start("serve", *named, *arguments)


def ask(address: str, *, timeout: float = 30.0, model: str = "ctr", **request: object) -> serving_pb2.LookupReply:
    with grpc.insecure_channel(address) as channel:
        table = serving_pb2.TableKeys(table="user", packed_keys=KEYS.tobytes())
        stub = serving_pb2_grpc.ServingStub(channel)
        return stub.Lookup(serving_pb2.LookupRequest(model=model, tables=[table], **request), timeout=timeout)


def parts(reply: serving_pb2.LookupReply) -> tuple[np.ndarray, np.ndarray]:
    table = reply.tables[0]
    rows = np.frombuffer(table.rows, np.float32).reshape(len(KEYS), DIM)
    return rows, np.frombuffer(table.answered, np.bool_)


def test_any_process_answers_for_every_key(root: str, launcher: Launcher) -> None:
    ports = [free_port(), free_port()]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    peers = f"--peers={','.join(addresses)}"
    first = serve(launcher, root, ports[0], "--shard=0/2", peers, "--http-port=0")
    second = serve(launcher, root, ports[1], "--shard=1/2")
    http = first.wait_for(r"HTTP (\S+)\n")[1]
    second.wait_for("ready at")
    wait_until(lambda: parts(ask(addresses[0]))[1].all(), "the peers")
    reply = ask(addresses[0])
    rows, _ = parts(reply)
    np.testing.assert_array_equal(rows, rows_of(1))
    assert np.frombuffer(reply.tables[0].found, np.bool_).all()
    assert all(reply.tables[0].versions)
    assert not reply.problems
    body = json.dumps({"model": "ctr", "tables": {"user": KEYS.tolist()}, "deadline_ms": 3000}).encode()
    with urllib.request.urlopen(f"http://{http}/v1/lookup", body, timeout=30) as answer:
        told = json.loads(answer.read())
    assert all(told["tables"]["user"]["answered"])
    np.testing.assert_array_equal(np.array(told["tables"]["user"]["rows"], np.float32), rows_of(1))
    for wrong in (0, "x", True):
        body = json.dumps({"model": "ctr", "tables": {}, "deadline_ms": wrong}).encode()
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"http://{http}/v1/lookup", body, timeout=30)
        assert "deadline_ms: " in json.loads(raised.value.read())["error"]

    alone = ask(addresses[1])  # has no peers: says whose keys the others are
    assert 0 < parts(alone)[1].sum() < len(KEYS)
    assert list(alone.problems) == ["keys belong to serving shards 0 of 2; ask those, or start serving with --peers"]

    second.signal(signal.SIGSTOP)  # a deadline that is too short: what there is, with a mask, and no hang
    partial = ask(addresses[0], deadline_ms=1000)
    rows, answered = parts(partial)
    assert 0 < answered.sum() < len(KEYS)
    np.testing.assert_array_equal(rows[answered], rows_of(1)[answered])
    assert not rows[~answered].any()
    assert "serving shard 1: " in partial.problems[0]
    second.signal(signal.SIGCONT)
    wait_until(lambda: parts(ask(addresses[0]))[1].all(), "the second shard")


def test_a_process_is_not_ready_before_it_knows_its_peers(root: str, launcher: Launcher) -> None:
    ports = [free_port(), free_port()]
    http = f"http://127.0.0.1:{free_port()}/v1/health"
    peers = f"--peers={','.join(f'127.0.0.1:{port}' for port in ports)}"
    first = serve(launcher, root, ports[0], "--shard=0/2", peers, f"--http-port={http.split(':')[2].split('/')[0]}")

    def health() -> tuple[int, dict]:
        try:
            with urllib.request.urlopen(http, timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError:
            return 0, {}

    # It has loaded its own slots, and answers for them alone.
    wait_until(lambda: health()[0] and ask_or_none(ports[0]) is not None, "the rows of the first shard")
    assert not parts(ask(f"127.0.0.1:{ports[0]}"))[1].all()
    wait_until(lambda: "serving shard 1 of 2" in health()[1].get("problems", {}).get("peers", ""), "the reason")
    code, told = health()
    assert (code, told["ready"]) == (503, False)
    assert "ready at" not in first.out
    serve(launcher, root, ports[1], "--shard=1/2", peers)
    first.wait_for("ready at")
    assert health() == (200, {"ready": True, "problems": {}})
    assert parts(ask(f"127.0.0.1:{ports[0]}"))[1].all(), "from its first moment as ready on"


def ask_or_none(port: int) -> serving_pb2.LookupReply | None:
    try:
        return ask(f"127.0.0.1:{port}")
    except grpc.RpcError:
        return None


def test_processes_on_this_machine_know_each_other(root: str) -> None:
    with sr.local_serving("ctr", root=root, shards=2, poll="50ms") as serving:
        for address in serving.addresses:
            assert parts(ask(address))[1].all(), "ready, and does not know its peers"
            np.testing.assert_array_equal(parts(ask(address))[0], rows_of(1))


def test_peers_are_checked(root: str, launcher: Launcher) -> None:
    for arguments, words in (
        (("--peers=127.0.0.1:1",), "--peers has no effect with one shard"),
        (("--peers=nowhere", "--shard=0/2"), "--peers: 'nowhere' is not allowed"),
        (("--sync-max-delay=3s",), "--sync-max-delay has no effect without"),
        (("--sync-after-updates=3",), "have no effect without --follow"),
        (("--sync-after-updates=-3", "--follow=127.0.0.1:1"), "--sync-after-updates: -3 is not allowed"),
        (("--sync-after-move=nan", "--follow=127.0.0.1:1"), "--sync-after-move: nan is not allowed"),
    ):
        assert words in serve(launcher, root, 0, *arguments).error_line()


def test_a_canary_gets_its_share_of_routing_keys(root: str, launcher: Launcher) -> None:
    port = free_port()
    serve(launcher, root, port).wait_for("ready at")
    address = f"127.0.0.1:{port}"
    moved = launcher.start("alias", "ctr@live", "2", "--canary=0.25", f"--root={root}")
    assert moved.end() == 0, moved.err
    with sr.ServingClient(address, refresh_sec=0.05) as client:
        users = [f"user-{number}" for number in range(400)]

        def versions() -> list[int]:
            return [client.lookup("user", KEYS, routing_key=user).version for user in users]

        wait_until(lambda: 2 in versions(), "the canary")
        first = versions()
        assert 60 <= first.count(2) <= 140  # 25 % of 400: 100, four deviations of 9 and a little to each side
        assert versions() == first  # a routing key stays where it is
        for user, version in zip(users[:40], first, strict=False):
            found = client.lookup("user", KEYS, routing_key=user)
            np.testing.assert_array_equal(found.rows, rows_of(version))
            reply = ask(address, routing_key=user)  # the other door has the same rule
            assert reply.version == version
        assert {client.lookup("user", KEYS).version for _ in range(20)} == {1}
    ModelRegistry(root).point("ctr", "live", 1)


def test_an_alias_moves_under_full_load_and_no_request_fails(root: str, launcher: Launcher) -> None:
    ports = [free_port(), free_port()]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    peers = f"--peers={','.join(addresses)}"
    for shard, port in enumerate(ports):
        serve(launcher, root, port, f"--shard={shard}/2", peers)
    wait_until(lambda: all_answered(addresses), "both shards")
    failures: list[str] = []
    counts = {"client": 0, "gRPC": 0}
    seen: set[int] = set()
    stop = threading.Event()

    def keep(name: str, once: object) -> None:
        while not stop.is_set():
            try:
                version, rows, answered = once()  # type: ignore[operator]
            except Exception as error:
                failures.append(f"{name}: {error!r}")
                continue
            counts[name] += 1
            seen.add(version)
            if not answered.all() or not np.array_equal(rows, rows_of(version)):
                failures.append(f"{name}: version {version}: {int(answered.sum())} of {len(KEYS)} rows")

    with sr.ServingClient(addresses, refresh_sec=0.05) as client, contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address)) for address in addresses]
        table = serving_pb2.TableKeys(table="user", packed_keys=KEYS.tobytes())

        def by_client() -> tuple[int, np.ndarray, np.ndarray]:
            found = client.lookup("user", KEYS, deadline_ms=10_000)
            return found.version, found.rows, found.answered

        def by_grpc() -> tuple[int, np.ndarray, np.ndarray]:
            stub = serving_pb2_grpc.ServingStub(channels[counts["gRPC"] % 2])
            request = serving_pb2.LookupRequest(model="ctr", tables=[table], deadline_ms=10_000)
            reply = stub.Lookup(request, timeout=60)
            return (reply.version, *parts(reply))

        threads = [
            threading.Thread(target=keep, args=(name, once))
            for name, once in (("client", by_client), ("gRPC", by_grpc))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for move in range(6):
            wanted = 2 - move % 2
            ModelRegistry(root).point("ctr", "live", wanted)
            wait_until(lambda wanted=wanted: client.version == wanted, f"version {wanted}")
            before = dict(counts)  # lookups of each kind in each version
            wait_until(
                lambda before=before: failures or all(counts[name] > before[name] + 1 for name in counts), "lookups"
            )
        stop.set()
        for thread in threads:
            thread.join()
    print(counts)
    assert failures == []
    assert seen == {1, 2}
    assert all(counts.values())


def all_answered(addresses: list[str]) -> bool:
    try:
        return all(bool(parts(ask(address))[1].all()) for address in addresses)
    except grpc.RpcError:
        return False
