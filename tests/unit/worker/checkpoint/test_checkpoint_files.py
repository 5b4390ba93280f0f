"""The files of a checkpoint: formats, checksums, folders; what is damaged is named, half of one is none."""

from __future__ import annotations

import errno
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from sparserow.cpp_ext.torch_arrays import tensor_of
from sparserow.deploy.commands.publish import _features
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.row_parts import PartFacts, Rows, decode_rows, encode_rows
from sparserow.proto.checkpoint.state_tree import decode_tree
from sparserow.proto.checkpoint.tensor_file import Tensor, decode, encode
from sparserow.proto.checkpoint.urls import parent_of
from sparserow.proto.config.checkpoint_config import CheckpointConfig
from sparserow.proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from sparserow.proto.optim import Adagrad
from sparserow.proto.schema import TableSchema
from sparserow.worker.checkpoint.state_tree import encode_tree
from sparserow.worker.data.feature_tensors import read_vocabulary
from sparserow.worker.publish.program_export import program_of_file
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.training_checkpoints import TrainingCheckpoints

FACTS = PartFacts(0xABC, "n/t", 7, "bfloat16", 64, 3, 9)


def rows(count: int) -> Rows:
    return Rows(
        keys=np.arange(count, dtype=np.uint64),
        versions=np.arange(count, dtype=np.uint64) + np.uint64(1 << 48),
        update_counts=np.full(count, 3, np.uint32),
        weights=np.arange(count * 4, dtype=np.uint16).reshape(count, 4),
        state=np.linspace(0, 1, count * 2, dtype=np.float32).reshape(count, 2),
    )


def data_of(encoded) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else piece.tobytes() for piece in encoded.pieces)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_part_is_what_it_was_and_the_library_reads_it(tmp_path, count):
    encoded = encode_rows([(FACTS, rows(count))])
    Folder(str(tmp_path)).write("part.safetensors", encoded.pieces)
    data = Folder(str(tmp_path)).read("part.safetensors")
    assert len(data) == encoded.size
    ((facts, back),) = decode_rows(data, "part")
    assert facts == FACTS
    for name, column in vars(rows(count)).items():
        np.testing.assert_array_equal(getattr(back, name), column)
    with safe_open(tmp_path / "part.safetensors", "pt") as found:
        assert found.metadata()["sparserow.table"] == "n/t"
        assert found.get_tensor("weight").dtype == torch.bfloat16
        assert found.get_tensor("key").tolist() == list(range(count))


def test_ages_are_in_a_part_whose_policy_asks_for_them():
    plain = rows(10)
    aged = Rows(*list(vars(plain).values())[:5], age_steps=np.arange(10, dtype=np.uint32))
    for given in (plain, aged):
        ((_, back),) = decode_rows(memoryview(data_of(encode_rows([(FACTS, given)]))), "part")
        np.testing.assert_array_equal(back.age_steps, given.age_steps)
        assert len(back.push_seconds) == 0
    np.testing.assert_array_equal(aged.take(np.arange(10) > 7).age_steps, [8, 9])


def test_what_is_flipped_or_cut_is_named():
    data = data_of(encode_rows([(FACTS, rows(100))]))
    for damaged in (data[:-1], data[:100], data[:5], data[:-40] + b"\x00" * 40):
        with pytest.raises(DataLoss, match=r"^the part: "):
            decode_rows(memoryview(damaged), "the part")
    other = data.replace(b'"sparserow.format":"1"', b'"sparserow.format":"9"')
    with pytest.raises(DataLoss, match=r"has format '9'; this program reads 1"):
        decode_rows(memoryview(other), "the part")


def test_a_tensor_file_of_plain_dtypes_is_read_by_the_library(tmp_path):
    tensors = {"a": Tensor("F64", np.ones((2, 3))), "b": Tensor("I32", np.arange(4, dtype=np.int32))}
    Folder(str(tmp_path)).write("x", encode(tensors, {"by": "us"}).pieces)
    found = load_file(tmp_path / "x")
    assert found["b"].tolist() == [0, 1, 2, 3]
    assert found["a"].shape == (2, 3)
    metadata, _ = decode(Folder(str(tmp_path)).read("x"), "x")
    assert metadata["by"] == "us"


def test_a_state_tree_is_what_it_was():
    tree = {
        "plain": {"none": None, "yes": True, "pi": 3.5, "text": "a", "nan": float("nan")},
        "by number": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "tuple": (1, (2, [3, (4,)])),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "scalar": np.float64(2.5),
        "array": np.arange(5, dtype=np.uint32),
        "$odd": {"$tensor": 1},
    }
    encoded = encode_tree(tree, {})
    back = decode_tree(memoryview(data_of(encoded)), "state", tensor_of)
    assert back["plain"] | {"nan": 0} == tree["plain"] | {"nan": 0}
    assert back["by number"][0]["step"] == 3.0
    assert back["tuple"] == tree["tuple"]
    assert back["half"].dtype == torch.bfloat16
    assert torch.equal(back["half"], tree["half"])
    assert torch.equal(back["mask"], tree["mask"])
    assert back["empty"].shape == (0, 3)
    assert back["scalar"] == 2.5
    assert back["array"].tolist() == list(range(5))
    assert back["$odd"] == {"$tensor": 1}


def test_a_state_that_no_file_can_hold_is_named():
    with pytest.raises(InvalidArgument, match=r"reader\.lock is a set"):
        encode_tree({"reader": {"lock": set()}}, {})


def test_values_of_a_live_tensor_are_those_of_the_call():
    weight = torch.zeros(4)
    encoded = encode_tree({"w": weight}, {})
    weight += 1
    assert decode_tree(memoryview(data_of(encoded)), "state", tensor_of)["w"].tolist() == [0.0] * 4


def saved(folder: Folder, name: str, **other) -> files.Manifest:
    part = encode_rows([(FACTS, rows(10))])
    (folder / name).write("rows.0", part.pieces)
    schema = TableSchema("n", "t", 4, Adagrad(), dtype="bfloat16", id=7, version=1)
    entry = files.PartEntry("rows.0", part.size, part.xxh3, shard=0, first_slot=3, end_slot=9, rows=10)
    job = files.JobEntry(5, "n/j", 0, 1, 12, ((1, 2, 3),), ({"workers": [{"answers": [[1, 2]]}]},))
    made = files.Manifest(
        name=name,
        created=files.now_text(),
        cluster_id=0xABC,
        slot_count=64,
        shards=1,
        lineage=4,
        tables=(files.TableEntry(schema, (entry,)),),
        jobs=(job,),
        job=5,
        **other,
    )
    (folder / name).put(files.FILE, made.to_bytes())
    return made


def test_a_folder_of_checkpoints(tmp_path):
    folder = Folder(str(tmp_path / "deep" / "ckpt"))
    assert files.list_names(folder) == []
    with pytest.raises(NotFound, match="there is no checkpoint"):
        files.read_manifest(folder)
    made = [saved(folder, files.begin_folder(folder), config={"a": [1]}) for _ in range(3)]
    assert [m.name for m in made] == files.list_names(folder) == ["save-000001", "save-000002", "save-000003"]
    found = files.read_manifest(folder)
    assert found == made[-1]
    assert (found.step, found.rows) == (12, 10)
    assert files.read_manifest(folder, "save-000002").name == "save-000002"
    with pytest.raises(NotFound, match=r"no checkpoint 'save-000009'; there are: save-000001, "):
        files.read_manifest(folder, "save-000009")
    assert files.verify(folder, [found]) == found.size > 0
    assert files.prune(folder, 2) == ["save-000001"]
    with pytest.raises(InvalidArgument, match=r"keep: 0 is not allowed"):
        files.prune(folder, 0)


def test_a_chain_is_kept_together(tmp_path):
    folder = Folder(str(tmp_path))
    names = ("save-000001", "save-000002")
    links = ({}, *({"base": names[n], "chain": n + 1, "needs": names[: n + 1]} for n in range(2)), {})
    made = [saved(folder, files.begin_folder(folder), **link) for link in links]
    assert files.read_chain(folder, "save-000003") == made[:3]
    assert files.read_chain(folder) == made[3:]
    assert files.prune(folder, 2) == [], "the third needs the first two"
    (folder / "save-000001").remove()
    with pytest.raises(DataLoss, match="save-000002 adds to save-000001, which is missing"):
        files.read_chain(folder, "save-000003")
    assert files.prune(folder, 1) == ["save-000002", "save-000003"]


def test_a_killed_save_is_none_and_is_cleaned_up(tmp_path):
    folder = Folder(str(tmp_path))
    saved(folder, files.begin_folder(folder))
    killed = files.begin_folder(folder)
    (folder / killed).write("rows.0", [b"half"])
    (tmp_path / killed / "manifest.json.partial").write_bytes(b"{")
    (tmp_path / "notes.txt").write_text("the user's")
    assert files.list_names(folder) == ["save-000001"]
    assert files.begin_folder(folder) == "save-000003"
    assert not (tmp_path / killed).exists()
    assert (tmp_path / "notes.txt").exists()


def test_damage_is_named(tmp_path):
    folder = Folder(str(tmp_path))
    made = saved(folder, files.begin_folder(folder))
    part = tmp_path / made.name / "rows.0"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(DataLoss, match=r"rows\.0: the file has \d+ bytes; its manifest says"):
        files.verify(folder, [made])
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataLoss, match=r"rows\.0: is damaged: its checksum does not match"):
        files.verify(folder, [made])
    part.unlink()
    with pytest.raises(DataLoss, match=r"rows\.0: the file is missing"):
        files.verify(folder, [made])
    manifest = tmp_path / made.name / files.FILE
    document = json.loads(manifest.read_text())
    document["checkpoint"]["lineage"] += 1
    manifest.write_text(json.dumps(document))
    with pytest.raises(DataLoss, match="its checksum does not match"):
        files.read_manifest(folder)
    document["checkpoint"]["format"] = 99
    manifest.write_text(json.dumps(document))
    with pytest.raises(FailedPrecondition, match="has format 99; this program reads format 1"):
        files.read_manifest(folder)
    manifest.write_text("{")
    with pytest.raises(DataLoss, match="is damaged: it is not JSON"):
        files.read_manifest(folder)


@pytest.mark.parametrize("url", ["", None, 5, Path("models")])
def test_a_folder_without_a_name_is_not_the_present_one(url: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"folder: .* is not allowed; allowed: a path or URL as text"):
        Folder(url)


def test_urls_that_cannot_be_used(tmp_path):
    with pytest.raises(InvalidArgument, match="nosuch://x"):
        Folder("nosuch://x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FailedPrecondition, match="file"):
        Folder(str(tmp_path / "file" / "ckpt")).make()


@contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of root, where the tests have them."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
            os.setegid(0)


def test_a_folder_without_permission_is_refused_and_what_it_holds_stays():
    with tempfile.TemporaryDirectory() as made:  # pytest's own is closed to others
        os.chmod(made, 0o755)
        for name, mode in (("closed", 0o555), ("open", 0o777)):
            os.mkdir(f"{made}/{name}")
            saved(Folder(f"{made}/{name}"), files.begin_folder(Folder(f"{made}/{name}")))
            os.chmod(f"{made}/{name}", mode)
        closed = Folder(f"{made}/closed")
        before = files.read_manifest(closed)
        with nobody():
            assert files.begin_folder(Folder(f"{made}/open")) == "save-000002"  # it is the mode that refuses
            for size in (1, 5 << 20):
                with pytest.raises(FailedPrecondition, match=r"closed/x: Permission denied"):
                    closed.write("x", [bytes(size)])
            with pytest.raises(FailedPrecondition, match=r"closed.*: Permission denied"):
                files.begin_folder(closed)
        assert closed.names() == [before.name]
        assert files.read_manifest(closed) == before
        assert files.verify(closed, [before]) == before.size
        os.chmod(f"{made}/closed", 0o755)


def test_another_file_system_holds_whole_objects():
    folder = Folder("memory://checkpoints/test")
    made = saved(folder, files.begin_folder(folder))
    assert files.read_manifest(folder) == made
    assert files.verify(folder, [made]) == made.size
    (folder / files.begin_folder(folder)).write("rows.0", [b"half"])
    assert files.list_names(folder) == [made.name]
    files.begin_folder(folder)
    assert "save-000002" not in folder.names()
    folder.remove()
    assert folder.names() == []


def test_a_run_resumes_from_the_newest_checkpoint_that_has_all_its_workers(tmp_path):
    folder = Folder(str(tmp_path))

    def newest(world: int) -> str | None:
        config = CheckpointConfig(url=str(tmp_path), every_steps=1)
        group = WorkerGroup(0, world, meets=False)
        return TrainingCheckpoints(config, session=None, group=group, parts=None, run={}).newest()

    assert newest(1) is None
    for ranks in ((), (0, 1), (0,), ()):  # the last by `sparserow checkpoint save`
        workers = tuple(files.WorkerEntry("w", 1, "0", rank=rank, worker_id=rank, epoch=1) for rank in ranks)
        saved(folder, files.begin_folder(folder), workers=workers)
    assert [newest(world) for world in (1, 2, 3)] == ["save-000003", "save-000002", "save-000004"]


def test_a_large_file_has_all_bytes_of_its_pieces(tmp_path):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    for last in (0, 1, 4096, 4097):
        sizes = [7, 0, 1 << 20, (1 << 20) - 7, 5_000_000, last]
        pieces = [draw.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        Folder(str(tmp_path)).write("x", pieces)
        assert (tmp_path / "x").read_bytes() == b"".join(piece.tobytes() for piece in pieces), sizes


def test_a_file_system_without_direct_writes_gets_the_file_all_the_same(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *mode, **more):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *mode, **more)

    data = np.arange(1 << 20, dtype=np.uint64)
    monkeypatch.setattr(os, "open", refuse)
    Folder(str(tmp_path)).write("x", [b"head", data])
    monkeypatch.undo()
    assert (tmp_path / "x").read_bytes() == b"head" + data.tobytes()


@pytest.mark.parametrize(
    ("path", "folder"),
    [("x", "."), ("a/x", "a"), ("/x", "/"), ("/a/x", "/a"), ("s3://b/x", "s3://b"), ("file:///x", "file:///")],
)
def test_the_folder_of_a_path(path: str, folder: str) -> None:
    assert parent_of(path) == (folder, "x")


def test_a_file_at_the_root_is_not_one_of_the_present_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"sparserow-{secrets.token_hex(8)}"
    (tmp_path / name).write_text("of the present folder")
    with pytest.raises(NotFound, match=f"/{name}"):
        read_vocabulary(f"/{name}")
    with pytest.raises(NotFound, match=f"program: /{name} does not exist"):
        program_of_file(f"/{name}", set(), is_signed=False)
    with pytest.raises(NotFound, match=f"/{name}: no such file"):
        _features("features", f"/{name}")
    Folder("memory:///").write(name, [b"at the root"])
    assert read_vocabulary(f"memory://{name}") == read_vocabulary(f"memory:///{name}") == b"at the root"
