"""What each version wrote is read with today's code, row by row; what a later version may write is refused by name."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import sparserow as sr
from checkpoint_rows import rows_of_checkpoint
from fixtures import (
    CLUSTER_ID,
    DENSE,
    DIM,
    FIXTURES,
    KEYS,
    NAMESPACE,
    PUSHED,
    REQUEST_ID,
    ROWS,
    STATE_OPTIONS,
    STEP,
    TABLE,
    TABLE_ID,
    body_of,
    copy_ssd,
    model,
    new_client,
    new_store,
    pull,
    push,
    read_frame,
    recorded,
    serving_shard,
    type_of,
)
from sparserow.deploy.observe.ssd_inspection import decode_row, inspect_folder
from sparserow.proto.checkpoint import manifest as checkpoint_files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.row_parts import decode_rows
from sparserow.proto.checkpoint.state_tree import decode_tree
from sparserow.proto.errors import SparserowError
from sparserow.proto.names import id_of_name
from sparserow.proto.published.registry import ModelRegistry
from sparserow.ps_server.coordinator.server import CoordinatorOptions, load_or_create
from sparserow.ps_server.coordinator.state.cluster import Cluster
from sparserow.ps_server.coordinator.storage.state_file import StateFile
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.loaded_version import load_version

HELLO_ACK, ROWS_TYPE, ACK = 2, 4, 8
PAGE_HEADER_BYTES = 64
VERSIONS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


@pytest.fixture(params=VERSIONS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version wrote."""
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / "written"))


def test_this_version_has_fixtures_and_they_are_small() -> None:
    assert sr.__version__ in VERSIONS
    for version in VERSIONS:
        assert sum(path.stat().st_size for path in (FIXTURES / version).rglob("*") if path.is_file()) < 200_000


def test_the_rows_of_a_checkpoint(written: Path) -> None:
    found = rows_of_checkpoint(written / "checkpoint")[f"{NAMESPACE}/{TABLE}"]
    assert {key: weights for key, (_, _, weights, _) in found.items()} == {
        key: row.tobytes() for key, row in zip(KEYS.tolist(), ROWS, strict=True)
    }


def test_a_checkpoint_is_restored_with_its_dense_weights(written: Path) -> None:
    restored = model()
    torch.nn.init.zeros_(restored.weight)
    with (
        sr.local_cluster(shards=2, slot_count=64) as cluster,
        sr.connect(cluster.address, NAMESPACE, staleness=None) as session,
    ):
        session.restore(str(written / "checkpoint"), model=restored)
        np.testing.assert_array_equal(session.table(TABLE).pull(KEYS), ROWS)
    assert restored.weight.tolist() == DENSE.tolist()


def test_a_published_version(written: Path) -> None:
    registry = ModelRegistry(str(written / "published"))
    loaded = load_version(registry, registry.manifest("ctr", 1), ShardAssignment())
    (schema,) = (table.schema for table in registry.manifest("ctr", 1).tables)
    rows, _, found = loaded.store.pull(schema.id, KEYS)
    assert found.all()
    np.testing.assert_array_equal(rows, ROWS)


def test_a_folder_of_an_ssd(written: Path, tmp_path: Path) -> None:
    folder = copy_ssd(written, tmp_path / "shard-0")
    found = {row.key: row.weights for row in inspect_folder(folder, table=str(TABLE_ID)).rows}
    assert found == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


def test_the_state_of_a_coordinator(written: Path) -> None:
    cluster = Cluster.from_document(json.loads((written / "state.json").read_text()), STATE_OPTIONS, now=0.0)
    assert cluster.cluster_id == CLUSTER_ID
    (schema,) = cluster.registry.tables()
    assert (schema.full_name, schema.dim, schema.id) == ("ads/user", DIM, id_of_name("ads/user"))
    (job,) = cluster.jobs.jobs.values()
    assert (job.name, [member.step for member in job.members.values()]) == ("ctr", [STEP])


def test_a_page_of_changes(written: Path) -> None:
    store = new_store()
    assert store.apply_changes((written / "changes.bin").read_bytes())["rows"] == len(KEYS)
    np.testing.assert_array_equal(store.pull(TABLE_ID, KEYS)[0], ROWS)


def test_a_shard_answers_a_client_of_that_version(written: Path) -> None:
    with serving_shard() as (store, port), socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        kinds = []
        for exchange in recorded(written):
            peer.sendall(exchange.request)
            reply = read_frame(peer)
            kinds.append(type_of(reply))
            assert type_of(reply) == type_of(exchange.reply)
            if type_of(reply) in (ROWS_TYPE, ACK):
                assert body_of(reply) == body_of(exchange.reply)
        assert kinds == [HELLO_ACK, ROWS_TYPE, ACK]
        np.testing.assert_array_equal(store.pull(TABLE_ID, KEYS)[0], PUSHED)


def test_a_client_reads_the_replies_of_a_shard_of_that_version(written: Path) -> None:
    exchanges, asked = recorded(written), []

    def answer(door: socket.socket) -> None:
        peer, _ = door.accept()
        with peer:
            for exchange in exchanges:
                request, reply = read_frame(peer), bytearray(exchange.reply)
                asked.append((type_of(request), body_of(request)))
                reply[REQUEST_ID] = request[REQUEST_ID]
                peer.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=answer, args=(door,), daemon=True)
        thread.start()
        client = new_client(door.getsockname()[1])
        np.testing.assert_array_equal(pull(client), ROWS)
        push(client)
        thread.join(60)
    hello = exchanges[0].request
    assert asked == [(type_of(hello), asked[0][1]), *((type_of(e.request), body_of(e.request)) for e in exchanges[1:])]


def raise_format(path: Path, place: int, layout: str) -> None:
    """Adds 1 to a number in a file."""
    data = bytearray(path.read_bytes())
    (number,) = struct.unpack_from(layout, data, place)
    struct.pack_into(layout, data, place, number + 1)
    path.write_bytes(data)


def raise_field(path: Path, *keys: str) -> None:
    """Adds 1 to a field of a JSON document."""
    document = json.loads(path.read_text())
    inner = document
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] += 1
    path.write_text(json.dumps(document))


def newer_checkpoint(folder: Path) -> None:
    raise_field(folder / "checkpoint" / "save-000001" / "manifest.json", "checkpoint", "format")
    checkpoint_files.read_manifest(Folder(str(folder / "checkpoint")))


def newer_version(folder: Path) -> None:
    raise_field(folder / "published" / "ctr" / "v000001" / "manifest.json", "format")
    ModelRegistry(str(folder / "published")).manifest("ctr", 1)


def newer_state(folder: Path) -> None:
    raise_field(folder / "state.json", "format")
    options = CoordinatorOptions(cluster=STATE_OPTIONS, state=folder / "state.json")
    load_or_create(options, StateFile(folder / "state.json").load())


def newer_changes(folder: Path) -> None:
    raise_format(folder / "changes.bin", 4, "<H")
    new_store().apply_changes((folder / "changes.bin").read_bytes())


def newer_ssd_page(folder: Path) -> None:
    raise_format(folder / "ssd" / "rows" / "page", 4, "<H")
    inspect_folder(copy_ssd(folder, folder / "shard-0"))


def newer_ssd_index(folder: Path) -> None:
    raise_format(folder / "ssd" / "rows" / "index", 4, "<I")
    inspect_folder(copy_ssd(folder, folder / "shard-0"))


def newer_ssd_row(folder: Path) -> None:
    page = (folder / "ssd" / "rows" / "page").read_bytes()
    row = bytearray(page[PAGE_HEADER_BYTES + 8 : PAGE_HEADER_BYTES + 8 + 24 + 4 * DIM])  # behind the key
    row[4] += 1
    seed = xxhash.xxh3_64_intdigest(page[PAGE_HEADER_BYTES : PAGE_HEADER_BYTES + 8], seed=TABLE_ID)
    row[:4] = struct.pack("<I", xxhash.xxh3_64_intdigest(bytes(row[4:]), seed=seed) & 0xFFFFFFFF)
    key = page[PAGE_HEADER_BYTES : PAGE_HEADER_BYTES + 8]
    decode_row(struct.pack(">HIQ", 0, TABLE_ID, int.from_bytes(key, "little")), bytes(row))


def with_format(path: Path, number: int) -> memoryview:
    """A safetensors file whose metadata has another format."""
    return memoryview(path.read_bytes().replace(b'"sparserow.format":"1"', b'"sparserow.format":"%d"' % number))


def newer_rows(folder: Path) -> None:
    decode_rows(with_format(folder / "checkpoint" / "save-000001" / "rows.0.0.safetensors", 3), "rows.0.0")


def newer_worker(folder: Path) -> None:
    file = folder / "checkpoint" / "save-000001" / "worker.0.safetensors"
    decode_tree(with_format(file, 2), "worker.0", lambda array, _: array)


def newer_ssd_folder(folder: Path) -> None:
    (folder / "ssd" / "SPARSEROW").write_text("format 3\nhash 1\ncluster 1\nshard 0\n")
    inspect_folder(copy_ssd(folder, folder / "shard-0"))


def newer_client(folder: Path) -> None:
    hello = bytearray(recorded(folder)[0].request)
    at = hello.index(b"SPRO") + 4
    hello[at : at + 2] = b"\2\2"  # the oldest and the newest protocol that the client speaks
    with serving_shard() as (_, port), socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        peer.sendall(hello)
        raise SparserowError(body_of(read_frame(peer)).decode("latin-1"))


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (newer_checkpoint, r"save-000001/manifest\.json: the manifest has format 2; this program reads format 1"),
        (newer_version, r"v000001/manifest\.json: the manifest has format 2; this program reads format 1"),
        (newer_state, r"--state \S+/state\.json: the state has format 7; this program reads format 6"),
        (newer_changes, r"the page of changes has format 6, and this process reads formats \[5, 5\]"),
        (newer_ssd_page, r"rows/pages: the page at byte 1048576 has format 2; this program reads format 1"),
        (newer_ssd_index, r"rows/index: the index has format 3; this program reads format 2"),
        (newer_ssd_row, "table id 7, key [1-8]: the row has format 2; this program reads format 1"),
        (newer_rows, r"rows\.0\.0: the file has format '3'; this program reads 1 and 2"),
        (newer_worker, r"worker\.0: the file has format '2'; this program reads 1"),
        (newer_ssd_folder, r"shard-0 has format 3; this build reads formats \[1, 2\]"),
        (newer_client, "protocol: the client speaks 2 to 2, this shard 1 to 1"),
    ],
)
def test_a_later_format_is_refused_by_name(read: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / sr.__version__, tmp_path / "written"))
    with pytest.raises(SparserowError, match=text):
        read(folder)
