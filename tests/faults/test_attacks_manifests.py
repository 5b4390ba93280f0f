"""Crafted files in a registry or a checkpoint's folder: a running server keeps what it has, and says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import sparserow as sr
from published_files import DIM, SLOT_COUNT, write_version
from sparserow.cpp_ext import _server
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.tensor_file import decode, encode
from sparserow.proto.errors import DataLoss
from sparserow.proto.optim import SGD
from sparserow.proto.published.dense import read_dense, write_dense
from sparserow.proto.published.registry import ModelRegistry
from sparserow.proto.schema import TableSchema
from sparserow.serving import versions as served_models
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.versions import ModelsOptions, ServedModels
from sparserow_process import Launcher, wait_until

BRACKETS = "[" * 100_000
KEYS = np.arange(20, dtype=np.uint64) * np.uint64(7)


def changed(**fields: Any) -> Callable[[dict[str, Any]], str]:
    """A manifest of which some fields, named by dotted paths with ``__``, have other values."""

    def change(document: dict[str, Any]) -> str:
        for path, value in fields.items():
            *parents, last = path.split("__")
            at: Any = document
            for parent in parents:
                at = at[int(parent) if parent.isdecimal() else parent]
            at[last] = value
        return json.dumps(document)

    return change


def without(field: str) -> Callable[[dict[str, Any]], str]:
    return lambda document: json.dumps({name: value for name, value in document.items() if name != field})


# The file, and the words that the error has.
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "brackets": (lambda _: BRACKETS, "it is nested too deep"),
    "deep card": (lambda d: json.dumps(d).replace('"auc": 0.8', '"auc": ' + "[" * 500 + "]" * 500), "nested too deep"),
    "no JSON": (lambda _: "{", "it is not JSON"),
    "a list": (lambda _: "[]", "format"),
    "version is text": (changed(version="2"), "version"),
    "version is a list": (changed(version=[2]), "version"),
    "version of another folder": (changed(version=1), "version"),
    "model of another folder": (changed(model="other"), "model"),
    "slot count is text": (changed(slot_count="64"), "slot_count"),
    "slot count is no power of two": (changed(slot_count=63), "slot_count"),
    "slot count is huge": (changed(slot_count=1 << 60), "slot_count"),
    "no slots": (without("slots"), "slots"),
    "card is a number": (changed(card=7), "card"),
    "bytes are negative": (changed(slots__bytes=-1), "bytes"),
    "bytes are text": (changed(tables__0__parts__0__bytes="9"), "bytes"),
    "rows are a list": (changed(tables__0__parts__0__rows=[1]), "rows"),
    "a file above": (changed(tables__0__parts__0__file="../../../etc/passwd"), "tables.0.parts.0.file"),
    "slots above": (changed(slots__file="/etc/passwd"), "plain file name"),
    "a program above": (changed(program={"file": "..", "bytes": 1, "xxh3": "0"}), "plain file name"),
    "a number as a file": (changed(slots__file=5), "file"),
    "cluster id is long": (changed(cluster_id="f" * 40), "cluster_id"),
    "dtype of none": (changed(tables__0__dtype=["int8"]), "dtype"),
}
ALIASES: dict[str, tuple[str, str]] = {
    "brackets": (BRACKETS, "nested too deep"),
    "a list": ("[1]", "aliases.json"),
    "version is text": ('{"live": {"version": "1"}}', "version"),
    "version is a list": ('{"live": {"version": [1]}}', "version"),
    "version is negative": ('{"live": {"version": -1}}', "version"),
    "canary is text": ('{"live": {"version": 1, "canary": "1", "canary_share": 0.5}}', "canary"),
    "share is text": ('{"live": {"version": 1, "canary": 1, "canary_share": "all"}}', "canary_share"),
    "share is not a number": ('{"live": {"version": 1, "canary": 1, "canary_share": NaN}}', "canary_share"),
    "history of text": ('{"live": {"version": 1, "history": "no"}}', "history"),
    "a name above": ('{"live": {"version": 1}, "../../x": {"version": 1}}', "../../x"),
    "long": ('{"live": {"version": 1}}' + " " * (4 << 20), "bytes"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A registry with version 1 of ``ctr``, which is live, and version 2, which is not."""
    folder = tmp_path / "models"
    for scale in (1, 2):
        write_version(str(folder), "ctr", np.full((20, DIM), scale, np.float32))
    ModelRegistry(str(folder)).point("ctr", "live", 1)
    return folder


@pytest.fixture
def models(root: Path) -> Iterator[ServedModels]:
    """What a serving process has: version 1 is loaded and live."""
    server = _server.Server(_server.Store(slot_count=SLOT_COUNT))
    made = ServedModels(ModelRegistry(str(root)), server, ModelsOptions((("ctr", "live"),), ShardAssignment()))
    made.refresh()
    assert made.problems() == {}
    yield made
    server.stop()


def check_kept(models: ServedModels, words: str) -> None:
    """Version 1 stands, and the problem says the file and what is wrong with it."""
    models.refresh()
    assert models.find("ctr", "live")[0].version == 1
    problem = models.problems()["ctr@live"]
    assert ".json" in problem, problem
    assert words in problem, problem


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_crafted_manifest_leaves_the_version_that_is_served(case: str, root: Path, models: ServedModels) -> None:
    craft, words = MANIFESTS[case]
    file = root / "ctr" / "v000002" / "manifest.json"
    file.write_text(craft(json.loads(file.read_text())))
    (root / "ctr" / "aliases.json").write_text('{"live": {"version": 2}}')
    check_kept(models, words)


@pytest.mark.parametrize("case", ALIASES)
def test_crafted_aliases_leave_the_version_that_is_served(case: str, root: Path, models: ServedModels) -> None:
    content, words = ALIASES[case]
    (root / "ctr" / "aliases.json").write_text(content)
    check_kept(models, words)


def test_a_failure_of_another_kind_leaves_the_version_that_is_served(
    models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("no such luck")

    with monkeypatch.context() as patched:
        patched.setattr(served_models, "newest_number", fail)
        models.refresh()
        assert models.problems() == {"ctr@live": "ZeroDivisionError: no such luck"}
    models.refresh()
    assert models.problems() == {}
    with monkeypatch.context() as patched:
        patched.setattr(models, "_give_up_unused", fail)
        models.refresh()
        assert models.problems() == {"unused versions": "ZeroDivisionError: no such luck"}
    models.refresh()
    assert models.problems() == {}
    assert models.find("ctr", "live")[0].version == 1


def test_a_running_server_goes_on_and_says_why(root: Path, launcher: Launcher) -> None:
    serving = launcher.start("serve", "--port=0", "--poll=20ms", f"--root={root}", "--model=ctr")
    address = serving.wait_for(r"ready at gRPC (\S+),")[1]
    aliases = root / "ctr" / "aliases.json"
    manifest = root / "ctr" / "v000002" / "manifest.json"
    good = manifest.read_text()
    with sr.ServingClient(address, refresh_sec=0.05) as client:
        for case in ("brackets", "no JSON", "version is text", "slot count is huge", "a file above"):
            craft, words = MANIFESTS[case]
            manifest.write_text(craft(json.loads(good)))
            aliases.write_text('{"live": {"version": 2}}')
            wait_until(lambda words=words: f"manifest.json: is damaged: {words}" in serving.err, words)
            aliases.write_text('{"live": {"version": 1}}')
            assert client.lookup("user", KEYS).version == 1
        aliases.write_text(BRACKETS)
        wait_until(lambda: "aliases.json: is damaged" in serving.err, "what is said of the aliases")
        assert client.lookup("user", KEYS).version == 1
        manifest.write_text(good)
        aliases.write_text('{"live": {"version": 2}}')
        wait_until(lambda: client.version == 2, "the version whose manifest is whole again")
        assert client.lookup("user", KEYS).rows.tolist() == np.full((20, DIM), 2).tolist()
    assert serving.popen.poll() is None


def test_no_name_leads_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")
    folder = Folder(str(tmp_path / "open"))
    folder.make()
    for name in ("../secret", "..", ".", "", "a/b", "/etc/passwd", "a\x00b", "a\nb", "x" * 256):
        for use in (folder.read, folder.exists, folder.size, folder.delete, folder.__truediv__):
            with pytest.raises(sr.errors.InvalidArgument, match="plain file name"):
                use(name)
        for write in (folder.put, folder.create, lambda name, data: folder.write(name, [data])):
            with pytest.raises(sr.errors.InvalidArgument, match="plain file name"):
                write(name, b"x")
    assert (tmp_path / "secret").read_text() == "hidden"


def test_dense_weights_come_from_their_own_folder(root: Path) -> None:
    folder = ModelRegistry(str(root)).folder("ctr", 1)
    weights = b"weights"
    write_dense(folder, [weights], 3)
    file = root / "ctr" / "v000001" / "dense" / "000001" / "manifest.json"
    (root.parent / "secret").write_bytes(weights)
    good = json.loads(file.read_text())
    assert bytes(read_dense(folder, 1)[1]) == weights
    for craft, words in (
        (changed(weights__file="../../../../../secret"), "weights.file"),
        (changed(weights__bytes=True), "weights.bytes"),
        (changed(number="1"), "number"),
        (changed(number=2), "number: 2 is not allowed; allowed here: 1"),
        (changed(weights__sha256="0" * 64), "does not match its SHA-256"),
        (changed(step=1.5), "step"),
        (lambda _: BRACKETS, "too many bytes"),
        (lambda _: BRACKETS[:60_000], "nested too deep"),
        (lambda _: "7", "the document"),
    ):
        file.write_text(craft(json.loads(json.dumps(good))))
        with pytest.raises(DataLoss, match=words):
            read_dense(folder, 1)


def of_checkpoint(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A checkpoint's manifest of which something was changed, with a checksum that holds."""
    part = files.PartEntry("rows.0.0.safetensors", 10, "ab", 0, 0, 64, 3)
    slots = files.SlotsEntry("slots.0.safetensors", 10, "ab", 0, 64)
    job = files.JobEntry(5, "ads/default", 0, 1, 7, ((0, 1, 7),), ({"job": 5},))
    schema = TableSchema("n", "t", 4, SGD(), id=7, version=1)
    tables = (files.TableEntry(schema, (part,)),)
    whole = files.Manifest("save-000002", files.now_text(), 1, 64, 1, 1, tables, (slots,), (job,))
    assert files.Manifest.of_bytes(whole.to_bytes(), "x") == whole
    body = json.loads(whole.to_bytes())["checkpoint"]
    change(body)
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({"xxh3": checksum, "checkpoint": body}).encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body["parts"][0].__setitem__(0, "../../secret"), "tables.0.parts.0.file: .* plain file name"),
        (lambda body: body["slots"][0].update(file="/etc/passwd"), "slots.0.file: .* plain file name"),
        (lambda body: body["slots"][0].update(bytes=-1), "slots.0.bytes"),
        (lambda body: body["tables"][0]["parts"][0].__setitem__(0, 1), "IndexError"),
        (lambda body: body["tables"][0]["parts"][0].__setitem__(0, -1), "file is number -1"),
        (lambda body: body["tables"][0]["parts"][0].__setitem__(1, 0.5), "tables.0.parts.0.first_slot"),
        (lambda body: body["tables"][0].update(schema="AAAA"), "or is not a manifest"),
        (lambda body: body.update(base="../other"), "base"),
        (lambda body: body.update(needs=["../other"]), "needs.0: .* is not allowed"),
        (lambda body: body.update(chain="1"), "chain"),
        (lambda body: body.update(slot_count=1 << 40), "slot_count: .* a power of two"),
        (lambda body: body.update(slots=7), "slots: Input should be a valid tuple"),
        (lambda body: body.update(config=[1]), "config"),
        (lambda body: body.update(name="../x"), "name: .* is not allowed"),
        (lambda body: body["jobs"][0].update(sequences=[[1, 2]]), "jobs.0.sequences.0"),
        (lambda body: body["jobs"][0].update(name=["x"]), "jobs.0.name"),
        (lambda body: body.update(cluster_id="f" * 17), "cluster_id"),
    ],
)
def test_a_crafted_manifest_of_a_checkpoint_names_the_field(change: Any, words: str) -> None:
    with pytest.raises(DataLoss, match=f"^WHERE: is damaged.*{words}"):
        files.Manifest.of_bytes(of_checkpoint(change), "WHERE")


@pytest.mark.parametrize("data", [BRACKETS.encode(), b"", b"7", b"[]", b"\xff", b'{"checkpoint": 5}'])
def test_a_file_that_is_no_manifest_of_a_checkpoint(data: bytes) -> None:
    with pytest.raises(DataLoss, match=r"^WHERE: is damaged"):
        files.Manifest.of_bytes(data, "WHERE")


@pytest.mark.parametrize("note", [BRACKETS, '{"name": 5}', "[]", "x" * 5000])
def test_a_crafted_note_is_none(note: str, tmp_path: Path) -> None:
    (tmp_path / files.READ_WHOLE_FILE).write_text(note)
    assert files.last_read_whole(Folder(str(tmp_path))) is None


@pytest.mark.parametrize(
    "header",
    [
        BRACKETS,
        "[]",
        '{"__metadata__": [1]}',
        '{"__metadata__": {"sparserow.format": 1}}',
        '{"a": {"dtype": "F32", "shape": [0, 1180591620717411303424], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_crafted_file_of_tensors_is_named(header: str) -> None:
    text = header.encode()
    data = memoryview(len(text).to_bytes(8, "little") + text + b"abcd")
    with pytest.raises(DataLoss, match=r"^WHERE: is damaged"):
        decode(data, "WHERE")


@pytest.mark.parametrize("tree", [BRACKETS, "[1]", '{"$tensor": [1]}', '{"$dict": [[{}, 1]]}', '{"$array": "none"}'])
def test_a_crafted_state_is_named(tree: str) -> None:
    from sparserow.cpp_ext.torch_arrays import tensor_of
    from sparserow.proto.checkpoint.state_tree import decode_tree

    file = encode({}, {"sparserow.format": "1", "sparserow.state": tree})
    data = memoryview(b"".join(bytes(piece) for piece in file.pieces))
    with pytest.raises(DataLoss, match=r"^WHERE: is damaged"):
        decode_tree(data, "WHERE", tensor_of)


@pytest.mark.parametrize("claim", [BRACKETS, "[]", "{}", '{"time": "now"}', '{"time": 1e999}', "", '{"time": [1]}'])
def test_a_crafted_claim_stops_no_publisher_of_dense_weights(claim: str, root: Path) -> None:
    folder = ModelRegistry(str(root)).folder("ctr", 1)
    crafted = root / "ctr" / "v000001" / "dense" / "000001"
    crafted.mkdir(parents=True)
    (crafted / "claim.json").write_text(claim)
    numbers = [write_dense(folder, [b"x"], step).number for step in range(3)]
    assert numbers == [2, 3, 4]
    assert (crafted / "claim.json").exists(), "its age is not known, so another process may be writing it"
