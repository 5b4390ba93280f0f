"""Checkpoints on S3, as moto's server plays it: whole objects, retries, nothing half written, and what is refused."""

from __future__ import annotations

import contextlib
import os
import signal

import boto3
import fsspec
import numpy as np
import psutil
import pytest

import sparserow as sr
from checkpoint_rows import rows_of_checkpoint
from s3_server import s3_bucket, s3_server
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import FailedPrecondition, SparserowError
from sparserow_process import runs, wait_until

DIM = 32
PART_BYTES = 5 << 20  # the least that S3 allows; s3fs cuts what is twice as long into parts


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server, monkeypatch):
    """An empty bucket and a client of it."""
    with s3_bucket(server, monkeypatch) as name:
        yield name, boto3.client("s3")


def keys_of(bucket) -> list[str]:
    name, client = bucket
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=name).get("Contents", [])]


def uploads_of(bucket) -> list[str]:
    name, client = bucket
    return [entry["Key"] for entry in client.list_multipart_uploads(Bucket=name).get("Uploads", [])]


def test_saves_and_restores(bucket, launcher, tmp_path):
    url = f"s3://{bucket[0]}/jobs/ckpt"
    keys = np.arange(3000, dtype=np.uint64)
    with (
        sr.local_cluster(shards=2, slot_count=64) as cluster,
        sr.connect(cluster.address, "s3", staleness=None) as session,
    ):
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1))
        table.push(keys, np.ones((len(keys), DIM), np.float32))
        session.save(url, full_every=3)
        table.push(keys[:9], np.ones((9, DIM), np.float32))
        table.delete(keys[-2:])
        session.save(url, full_every=3, extra={"who": "rank 0"})
        session.save(str(tmp_path))
        expected = table.pull(keys)
    manifest = files.read_manifest(Folder(url))
    assert (manifest.base, manifest.chain) == ("save-000001", 1)
    verified = launcher.start("checkpoint", "verify", url)
    assert verified.end() == 0, verified.err
    with sr.local_cluster(shards=1, slot_count=64) as other, sr.connect(other.address, "s3", staleness=None) as session:
        assert session.restore(url).extra == {"who": "rank 0"}
        np.testing.assert_array_equal(session.table("rows").pull(keys), expected)
        session.save(url, keep=1)
    # The restore read the second one whole, which needs the first.
    assert files.list_names(Folder(url)) == ["save-000001", "save-000002", "save-000003"]
    files.note_read_whole(Folder(url), "save-000003")
    assert files.prune(Folder(url), 1) == ["save-000001", "save-000002"]
    assert {key.split("/")[2] for key in keys_of(bucket)} == {"save-000003", files.READ_WHOLE_FILE}
    rows = rows_of_checkpoint(url)["s3/rows"]
    assert rows == rows_of_checkpoint(tmp_path)["s3/rows"]


def test_a_killed_save_is_none_and_the_next_one_cleans_up(bucket):
    url = f"s3://{bucket[0]}/ckpt"
    keys = np.arange(60_000, dtype=np.uint64)
    with contextlib.suppress(SparserowError), sr.local_cluster(shards=2, slot_count=64) as cluster:  # noqa: SIM117
        with sr.connect(cluster.address, "killed", staleness=None) as session:
            table = session.create_table("rows", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1))
            session.save(url)
            table.push(keys, np.ones((len(keys), DIM), np.float32))
            session.save(url, wait=False)
            shards = [psutil.Process(pid) for pid in cluster.shard_pids]
            os.kill(cluster.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(runs, shards)), "the end of the shards, which follow their coordinator")
    before = files.list_names(Folder(url))
    assert before in (["save-000001"], ["save-000001", "save-000002"])
    files.verify(Folder(url), files.read_chain(Folder(url)))
    left = {key.split("/")[1] for key in keys_of(bucket)} - set(before)
    with (
        sr.local_cluster(shards=1, slot_count=64) as other,
        sr.connect(other.address, "next", staleness=None) as session,
    ):
        saved = session.save(url)
    assert files.list_names(Folder(url)) == [*before, saved.name]
    assert {key.split("/")[1] for key in keys_of(bucket)} == {*before, saved.name}, left


def test_a_large_object_is_there_whole_or_not_at_all(bucket, monkeypatch):
    pipe = fsspec.get_filesystem_class("s3")._pipe_file
    monkeypatch.setattr(pipe, "__defaults__", (PART_BYTES, *pipe.__defaults__[1:]))
    folder = Folder(f"s3://{bucket[0]}/ckpt/save-000001")
    data = os.urandom(2 * PART_BYTES + 1)
    folder.write("whole", [data[: 1 << 20], memoryview(data)[1 << 20 :]])
    assert folder.size("whole") == len(data)
    assert folder.read("whole") == data
    assert uploads_of(bucket) == []

    store = fsspec.filesystem("s3")
    call = store._call_s3

    async def refuses_parts(method, *arguments, **options):
        if method == "upload_part" and options["PartNumber"] == 2:
            raise OSError(5, "the network is gone")
        return await call(method, *arguments, **options)

    monkeypatch.setattr(store, "_call_s3", refuses_parts)
    monkeypatch.setattr("sparserow.proto.checkpoint.folder._TRIES", 1)
    with pytest.raises(FailedPrecondition, match=r"ckpt/save-000001/half: .*the network is gone"):
        folder.write("half", [data])
    assert keys_of(bucket) == ["ckpt/save-000001/whole"]
    assert uploads_of(bucket) == []


def test_what_a_killed_writer_had_begun_is_aborted(bucket):
    name, client = bucket
    for key in ("ckpt/save-000004/rows.0", "ckpt/notes/save", "ckpt-other/save-000001/rows.0"):
        client.create_multipart_upload(Bucket=name, Key=key)
    folder = Folder(f"s3://{name}/ckpt")
    files.begin_folder(folder)
    assert sorted(uploads_of(bucket)) == ["ckpt-other/save-000001/rows.0", "ckpt/notes/save"]


def test_a_refused_request_is_tried_again(bucket, monkeypatch):
    folder = Folder(f"s3://{bucket[0]}/ckpt")
    store = fsspec.filesystem("s3")
    pipe, refusals = store.pipe_file, iter(range(2))

    def refuses_twice(*arguments, **options):
        if next(refusals, None) is not None:
            raise OSError(16, "SlowDown: please reduce your request rate")
        return pipe(*arguments, **options)

    monkeypatch.setattr(store, "pipe_file", refuses_twice)
    monkeypatch.setattr("sparserow.proto.checkpoint.folder._FIRST_PAUSE_SEC", 0.01)
    folder.write("file", [b"x"])
    assert bytes(folder.read("file")) == b"x"
    assert next(refusals, "both") == "both"


def test_bad_input(bucket, monkeypatch):
    with (
        sr.local_cluster(shards=1, slot_count=64) as cluster,
        sr.connect(cluster.address, "bad", staleness=None) as session,
        pytest.raises(SparserowError, match="s3://no-such-bucket/ckpt"),
    ):
        session.save("s3://no-such-bucket/ckpt")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("sparserow.proto.checkpoint.folder._TRIES", 1)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(SparserowError, match=f"s3://{bucket[0]}/ckpt"):
        Folder(f"s3://{bucket[0]}/ckpt").names()
