"""Files and bytes of this version, as later versions have to read them: ``tests/fixtures/VERSION``.

``python tests/support/fixtures.py`` (``make fixtures``) writes those of this version anew. After a release they stay as
they are; until then they follow the formats.

checkpoint/         a checkpoint of one table, of a shard, with the state of one worker
published/          a published version of the table, without a program
ssd/                the folder of a shard's SSD: its manifest, its index, and the first page of its file ``pages``
state.json          the state of a coordinator
conversation.json   the frames of HELLO, a pull and a push, in order: type, request and reply as hexadecimal digits
changes.bin         a page of changes
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import sparserow as sr
from sparserow.cpp_ext import _client, _server
from sparserow.deploy.observe.page_log_inspection import SEGMENT_BYTES, UNIT_BYTES
from sparserow.proto.errors import error_of
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.membership import JobTerms

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
NAMESPACE, TABLE, TABLE_ID, DIM, SLOTS = "ads", "user", 7, 4, 64
KEYS = np.arange(1, 9, dtype=np.uint64)
ROWS = (KEYS[:, None] + np.arange(DIM) / 4).astype(np.float32)
GRADIENTS, LEARNING_RATE = np.full_like(ROWS, 0.5), 0.5
PUSHED = ROWS - LEARNING_RATE * GRADIENTS  # by SGD
DENSE = torch.arange(6, dtype=torch.float32).reshape(2, 3)  # the weight of the model in the checkpoint
STATE_OPTIONS = ClusterOptions(shards=2, slot_count=SLOTS)
CLUSTER_ID, JOB, EPOCH, STEP = 11, 3, 1, 12

# The layout of cpp_ext/rpc/wire/frame.h.
HEADER_BYTES, REQUEST_ID = 64, slice(8, 16)


@dataclass(frozen=True)
class Exchange:
    """A request of a client, and the reply of the shard: whole frames."""

    request: bytes
    reply: bytes


def type_of(frame: bytes) -> int:
    """The type of a frame."""
    return int(struct.unpack_from("<H", frame, 4)[0])


def body_of(frame: bytes) -> bytes:
    """A frame without its header, which has numbers and deadlines of the request."""
    return frame[HEADER_BYTES:]


def model() -> torch.nn.Linear:
    """The model in the checkpoint, with its weight."""
    made = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        made.weight.copy_(DENSE)
    return made


def new_store(**options: object) -> _server.Store:
    """A store with the table, whose rows begin at zero."""
    for native in (_client, _server):
        native.set_error_factory(error_of)
    store = _server.Store(slot_count=SLOTS, **options)
    store.create_table(_server.TableSchema(id=TABLE_ID, name=f"{NAMESPACE}/{TABLE}", dim=DIM))
    return store


def new_client(port: int) -> _client.Client:
    """A client of a shard."""
    owners = np.zeros(SLOTS, np.uint16)
    return _client.Client(
        shards=[("127.0.0.1", port)],
        slot_owner=owners,
        route_epoch=1,
        cluster_id=CLUSTER_ID,
        job_id=JOB,
        worker_epoch=EPOCH,
    )


@contextmanager
def serving_shard() -> Iterator[tuple[_server.Store, int]]:
    """A shard that has the rows, and its port."""
    store = new_store()
    store.assign(TABLE_ID, KEYS, ROWS)
    server = _server.Server(store, cluster_id=CLUSTER_ID)
    server.set_route(1, np.zeros(SLOTS, np.uint16))
    server.set_job(JOB, "ads/ctr", 0, [(0, EPOCH, 0)])
    try:
        yield store, server.port
    finally:
        server.stop()


def pull(client: _client.Client) -> np.ndarray:
    """The rows as the client reads them."""
    return client.pull(TABLE_ID, KEYS, dim=DIM)[0]


def push(client: _client.Client) -> None:
    """Pushes the gradients."""
    client.push(TABLE_ID, KEYS, GRADIENTS, dim=DIM, lr=LEARNING_RATE, sequence=1, step=0)


def read_frame(peer: socket.socket) -> bytes:
    """The next frame; b"" where the peer has closed."""
    header = _read(peer, HEADER_BYTES)
    return header + _read(peer, struct.unpack_from("<I", header)[0]) if header else b""


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


def recorded(folder: Path) -> list[Exchange]:
    """The conversation of a folder of fixtures."""
    lines = json.loads((folder / "conversation.json").read_text())
    return [Exchange(bytes.fromhex(line["request"]), bytes.fromhex(line["reply"])) for line in lines]


def copy_ssd(folder: Path, to: Path) -> Path:
    """Makes the folder of a shard of the recorded one, with a file ``pages`` as long as it was."""
    shutil.copytree(folder / "ssd", to)
    (to / "LOCK").touch()
    page = (to / "rows" / "page").read_bytes()
    with (to / "rows" / "pages").open("wb") as file:
        file.seek(SEGMENT_BYTES)  # the first segment is never used
        file.write(page)
        file.truncate(2 * SEGMENT_BYTES)
    return to


def _write_cluster(folder: Path) -> None:
    with (
        sr.local_cluster(shards=1, slot_count=SLOTS) as cluster,
        sr.connect(cluster.address, NAMESPACE, staleness=None) as session,
    ):
        session.create_table(TABLE, dim=DIM, optimizer=sr.optim.SGD(lr=LEARNING_RATE)).assign(KEYS, ROWS)
        session.save(str(folder / "checkpoint"), model=model())
        session.publish("ctr", root=str(folder / "published"))
    (folder / "published" / "ctr" / "v000001" / "claim.json").unlink()  # it names the machine, and no reader needs it


def _write_ssd(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        store = new_store(memory_budget_bytes=16 << 20, ssd_path=scratch, cluster_id=CLUSTER_ID)
        store.assign(TABLE_ID, KEYS, ROWS)
        store.write_back()
        del store  # which leaves the index
        made = Path(scratch)
        (folder / "rows").mkdir(parents=True)
        shutil.copy(made / "SPARSEROW", folder)
        shutil.copy(made / "rows" / "index", folder / "rows")
        with (made / "rows" / "pages").open("rb") as file:
            file.seek(SEGMENT_BYTES)
            (folder / "rows" / "page").write_bytes(file.read(UNIT_BYTES))


def _state() -> dict[str, object]:
    cluster = Cluster.create(STATE_OPTIONS)
    cluster.cluster_id = CLUSTER_ID
    ticket = cluster.jobs.register(NAMESPACE, "ctr", 0, JobTerms(1, 0, "mean"))
    cluster.jobs.admit(ticket, 0.0)
    cluster.jobs.heartbeat(ticket, STEP, 0.0)
    cluster.registry.admit(sr.TableSchema(NAMESPACE, TABLE, DIM, sr.optim.SGD()))
    return cluster.to_document()


def _conversation() -> list[Exchange]:
    exchanges: list[Exchange] = []
    with serving_shard() as (_, port), socket.create_server(("127.0.0.1", 0)) as door:

        def pass_on() -> None:
            client, _ = door.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as shard:
                while request := read_frame(client):
                    shard.sendall(request)
                    reply = read_frame(shard)
                    exchanges.append(Exchange(request, reply))
                    client.sendall(reply)

        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        client = new_client(door.getsockname()[1])
        assert np.array_equal(pull(client), ROWS)
        push(client)
        del client
        thread.join()
    return exchanges


def _changes() -> bytes:
    store = new_store()
    store.open_cursor("fixture", np.zeros(SLOTS, np.uint64))
    store.assign(TABLE_ID, KEYS, ROWS)
    page, _, _, is_last = store.read_changes("fixture", max_bytes=1 << 20)
    assert is_last
    return page.tobytes()


def write_fixtures(folder: Path) -> None:
    """Writes the fixtures of this version in place of those that the folder has."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write_cluster(folder)
    _write_ssd(folder / "ssd")
    (folder / "state.json").write_text(json.dumps(_state(), indent=1, sort_keys=True) + "\n")
    lines = [
        {"type": type_of(each.request), "request": each.request.hex(), "reply": each.reply.hex()}
        for each in _conversation()
    ]
    (folder / "conversation.json").write_text(json.dumps(lines, indent=1) + "\n")
    (folder / "changes.bin").write_bytes(_changes())


if __name__ == "__main__":
    write_fixtures(FIXTURES / sr.__version__)
    print(f"tests/fixtures/{sr.__version__}")
