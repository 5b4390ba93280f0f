"""Published versions that a writer of the registry changed, checksums renewed: a reader with a key names the field."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor, nn

import sparserow as sr
from crafted_programs import read_entries, write_entries
from forged_xxh3 import forged
from published_files import DIM, SLOT_COUNT, write_version
from sparserow.cpp_ext import _server
from sparserow.deploy.launch.security_files import init_signing_key
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.published.registry import ModelRegistry
from sparserow.proto.security.security import Security
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.versions import ModelsOptions, ServedModels
from sparserow_process import Launcher, wait_until

ROWS = "city,moment\nrome,2026-07-01T23:30:00\noslo,2026-07-01T03:30:00\n"
KEYS = np.arange(400, dtype=np.uint64) * np.uint64(7)
PARTS = ("rows.0.0.0.safetensors", "rows.0.0.1.safetensors")

Document = dict[str, Any]
Attack = Callable[[Path, Document], None]  # changes a version's files and the document of its manifest


def rewrite(version: Path, document: Document, file: str, data: bytes) -> None:
    """Gives a file other contents, with every checksum of it that the manifest has."""
    (version / file).write_bytes(data)
    parts = [part for table in document["tables"] for part in table["parts"]]
    for entry in (*parts, *document["features"], document["slots"], document["program"] or {}):
        if entry.get("file") == file:
            hashes = {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
            entry.update(hashes | ({"sha256": hashlib.sha256(data).hexdigest()} if entry.get("sha256") else {}))


def attack(version: Path, change: Attack) -> None:
    file = version / "manifest.json"
    document = json.loads(file.read_text())
    change(version, document)
    file.write_text(json.dumps(document))


def of_file(file: str, change: Callable[[bytes], bytes]) -> Attack:
    return lambda version, document: rewrite(version, document, file, change((version / file).read_bytes()))


def set_to(value: Any, *path: str | int) -> Attack:
    def change(_: Path, document: Document) -> None:
        *parents, last = path
        at: Any = document
        for parent in parents:
            at = at[parent]
        at[last] = value

    return change


def swapped(data: bytes) -> bytes:
    first, second, *others = data.splitlines(keepends=True)
    return b"".join([second, first, *others])


def other_weights(data: bytes) -> bytes:
    entries = read_entries(data)
    name = next(name for name in entries if name.startswith("data/weights/weight_"))
    return write_entries({**entries, name: np.full(len(entries[name]) // 4, 0.5, np.float32).tobytes()})


def proof_of(other: str) -> Attack:
    """The proof of another version, whose publisher signed it."""

    def change(version: Path, document: Document) -> None:
        document["proof"] = json.loads((version.parents[1] / other / "manifest.json").read_text())["proof"]

    return change


def renewed_proof(version: Path, document: Document) -> None:
    """The digests of the proof are renewed too, so that the signature alone is not."""
    set_to("evening", "card", "when")(version, document)
    canonical = json.dumps(document["card"], sort_keys=True, separators=(",", ":")).encode()
    document["proof"]["sha256"]["card"] = hashlib.sha256(canonical).hexdigest()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.city, self.hour = nn.Embedding(4, 4), nn.Embedding(25, 4)
        self.top = nn.Linear(8, 1)

    def forward(self, city: Tensor, hour: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.city(city), self.hour(hour)], dim=1)).squeeze(1)
        return scores


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Security, Security]:
    """The security files of a publisher and of readers."""
    folder = tmp_path_factory.mktemp("keys")
    init_signing_key(folder, "publisher")
    (folder / "publisher.yaml").write_text("signing_key: publisher.key\n")
    (folder / "reader.yaml").write_text("verification_key: publisher.pub\n")
    return Security.load(folder / "publisher.yaml"), Security.load(folder / "reader.yaml")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Security, Security]) -> Path:
    """A registry with signed versions ``ctr@1``, ``ctr@2`` and ``other@1`` of a model with features."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "cities.txt").write_text("rome\noslo\nbern\n")
    features = sr.features.Features(
        [
            sr.features.IdFeature("city", vocabulary=str(folder / "cities.txt")),
            sr.features.TimeFeature("hour", column="moment", zone="Europe/Berlin"),
        ]
    )
    example = {"city": ["rome", "oslo"], "moment": ["2026-07-01T12:00:00"] * 2}
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        torch.manual_seed(1)
        model = session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        model(torch.arange(4), torch.arange(4))
        sr.use_security(keys[0])
        try:
            for name, sign in (("ctr", None), ("ctr", "rows"), ("other", None)):
                root = str(folder / "models")
                session.publish(name, root=root, model=model, features=features, example=example, sign=sign)
        finally:
            sr.use_security(None)
    return folder / "models"


@pytest.fixture(scope="module")
def serving(published: Path) -> Iterator[sr.LocalServing]:
    """A process that serves the rows; each case reads the rest from a copy of the registry."""
    with sr.local_serving("ctr@1", root=str(published)) as serving:
        yield serving


@pytest.fixture
def predict(
    published: Path, serving: sr.LocalServing, tmp_path: Path, launcher: Launcher, keys: tuple[Security, Security]
) -> Callable[..., Any]:
    """Starts ``sparserow predict`` of ``ctr@1`` in a registry, with or without the publisher's key."""
    (tmp_path / "rows.csv").write_text(ROWS)

    def start(root: Path, *, with_key: bool) -> Any:
        security = [f"--security={keys[1].path}"] if with_key else []
        named = [f"--root={root}", f"--serving={serving.addresses[0]}", f"--input={tmp_path / 'rows.csv'}"]
        return launcher.start(*security, "predict", "--model=ctr@1", *named)

    return start


# The change, whether it changes scores where there is no key, and what a reader with a key says.
NOT_SIGNED = "is not what the publisher of the version has signed"
CHANGES: dict[str, tuple[Attack, bool, str]] = {
    "time zone": (
        of_file("features.json", lambda data: data.replace(b"Europe/Berlin", b"Asia/Tokyo")),
        True,
        f"manifest.json: features: {NOT_SIGNED}",
    ),
    "vocabulary": (of_file("vocabulary.0.txt", swapped), True, f"manifest.json: features: {NOT_SIGNED}"),
    "program": (of_file("program.pt2", other_weights), True, f"manifest.json: program: {NOT_SIGNED}"),
    "card": (set_to(0.99, "card", "auc"), False, f"manifest.json: card: {NOT_SIGNED}"),
    "proof of another version": (proof_of("ctr/v000002"), False, f"manifest.json: version: {NOT_SIGNED}"),
    "proof of another model": (proof_of("other/v000001"), False, f"manifest.json: model: {NOT_SIGNED}"),
    "proof removed": (set_to(None, "proof"), False, "manifest.json: the file is not signed"),
    "proof renewed": (renewed_proof, False, "manifest.json: proof: no key of verification_key in"),
    "signature": (set_to("bm9uZQ==", "proof", "signature"), False, "proof: no key of verification_key in"),
    "a field more": (set_to(1, "more"), False, f"manifest.json: more: {NOT_SIGNED}"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_predict_refuses_what_was_not_signed(
    case: str, published: Path, tmp_path: Path, predict: Callable[..., Any]
) -> None:
    change, shows, words = CHANGES[case]
    root = shutil.copytree(published, tmp_path / "models")
    good = predict(root, with_key=True)
    assert good.end() == 0, good.err
    assert len(good.out.split()) == 2
    attack(root / "ctr" / "v000001", change)
    assert words in predict(root, with_key=True).error_line()
    if shows:
        plain = predict(root, with_key=False)
        assert plain.end() == 0, plain.err
        assert plain.out != good.out, "without a key the change has its effect"


def test_a_changed_file_is_named_where_its_manifest_stands(
    published: Path, tmp_path: Path, predict: Callable[..., Any]
) -> None:
    """A byte that is changed so that XXH3 holds is found by SHA-256, with a key and without."""
    root = shutil.copytree(published, tmp_path / "models")
    version = root / "ctr" / "v000001"
    file = version / "program.pt2"
    before = file.read_bytes()
    file.write_bytes(forged(before, before[:4096] + bytes(512) + before[4608:], 4))
    assert xxhash.xxh3_64_hexdigest(file.read_bytes()) == xxhash.xxh3_64_hexdigest(before)
    for with_key in (True, False):
        line = predict(root, with_key=with_key).error_line()
        assert "program.pt2: the file does not match its SHA-256" in line


def test_a_publisher_says_no_path_of_its_own(published: Path) -> None:
    document = json.loads((published / "ctr" / "v000001" / "features.json").read_text())
    assert document["features"]["city"]["vocabulary"] == "vocabulary.0.txt"
    assert str(published.parent) not in json.dumps(document)
    program = (published / "ctr" / "v000001" / "program.pt2").read_bytes()
    assert b".py" not in program, program[program.index(b".py") - 100 :][:200]


def rows_of(scale: float) -> np.ndarray:
    return np.full((400, DIM), scale, np.float32)


@pytest.fixture
def root(tmp_path: Path, keys: tuple[Security, Security]) -> Path:
    """A registry with three signed versions of ``rows``: 1 is live, and the rows of 3 are signed too."""
    folder = tmp_path / "models"
    for number, sign in enumerate((None, None, "rows"), 1):
        write_version(str(folder), "rows", rows_of(number), security=keys[0], sign=sign)  # type: ignore[arg-type]
    ModelRegistry(str(folder)).point("rows", "live", 1)
    return folder


@pytest.fixture
def models(root: Path, keys: tuple[Security, Security]) -> Iterator[ServedModels]:
    """What a serving process with the publisher's key has: version 1 is loaded and live."""
    sr.use_security(keys[1])
    server = _server.Server(_server.Store(slot_count=SLOT_COUNT))
    made = ServedModels(ModelRegistry(str(root)), server, ModelsOptions((("rows", "live"),), ShardAssignment()))
    made.refresh()
    assert made.problems() == {}
    yield made
    server.stop()
    sr.use_security(None)


def attacked(number: int, change: Attack, root: Path, models: ServedModels) -> dict[str, str]:
    """Changes a version, lets the alias name it, and returns the problems of the serving process."""
    attack(root / "rows" / f"v{number:06d}", change)
    ModelRegistry(str(root)).point("rows", "live", number)
    models.refresh()
    return models.problems()


TABLES: dict[str, tuple[Attack, str]] = {
    "dim": (set_to(DIM // 2, "tables", 0, "schema", "dim"), "tables"),
    "dtype": (set_to("float16", "tables", 0, "dtype"), "tables"),
    "name": (set_to("item", "tables", 0, "schema", "name"), "tables"),
    "id": (set_to("78", "tables", 0, "schema", "id"), "tables"),
    "no table": (set_to([], "tables"), "tables"),
    "namespace": (set_to("other", "namespace"), "namespace"),
    "cluster": (set_to("a", "cluster_id"), "cluster_id"),
    "slots": (of_file("slots.safetensors", lambda data: data[:-8] + bytes(8)), "slots"),
    "rows are said to be signed": (set_to("rows", "sign"), "sign"),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_serving_process_refuses_tables_that_were_not_signed(case: str, root: Path, models: ServedModels) -> None:
    change, field = TABLES[case]
    problems = attacked(2, change, root, models)
    assert models.find("rows", "live")[0].version == 1
    assert f"manifest.json: {field}: {NOT_SIGNED}" in problems["rows@live"]


def forged_rows(version: Path, _: Document) -> None:
    """Rows of the first part are changed so that their XXH3 stays what it was."""
    file = version / PARTS[0]
    before = file.read_bytes()
    file.write_bytes(forged(before, before[:4096] + np.full(64, 99, np.float32).tobytes() + before[4352:], 4))


ROW_ATTACKS: dict[str, tuple[Attack, str]] = {
    "renewed": (of_file(PARTS[0], lambda data: data[:-4] + b"\0\0\xc6\x42"), f"tables: {NOT_SIGNED}"),
    "forged": (forged_rows, f"{PARTS[0]}: the file does not match its SHA-256"),
    "left out": (lambda _, document: document["tables"][0]["parts"].pop(), f"tables: {NOT_SIGNED}"),
    "no SHA-256": (set_to(None, "tables", 0, "parts", 0, "sha256"), f"tables: {NOT_SIGNED}"),
    "said to be unsigned": (set_to(None, "sign"), f"sign: {NOT_SIGNED}"),
}


@pytest.mark.parametrize("case", ROW_ATTACKS)
def test_signed_rows_are_those_that_were_published(case: str, root: Path, models: ServedModels) -> None:
    change, words = ROW_ATTACKS[case]
    problems = attacked(3, change, root, models)
    assert models.find("rows", "live")[0].version == 1
    assert words in problems["rows@live"]


@pytest.mark.parametrize("case", ["renewed", "forged", "left out"])
def test_rows_that_are_not_signed_can_be_changed(case: str, root: Path, models: ServedModels) -> None:
    """As docs/security.md says of versions without ``sign: rows``."""
    assert attacked(2, ROW_ATTACKS[case][0], root, models) == {}
    got, _, _ = models.find("rows", "live")[1][2].loaded.store.pull(77, KEYS)
    assert not np.array_equal(got, rows_of(2))


def test_an_older_signed_version_is_served_where_the_alias_goes_back(root: Path, models: ServedModels) -> None:
    """As docs/security.md says: a roll-back of an operator is nothing else."""
    aliases = root / "rows" / "aliases.json"
    aliases.write_text('{"live": {"version": 3}}')
    models.refresh()
    assert models.find("rows", "live")[0].version == 3
    aliases.write_text('{"live": {"version": 2}}')
    models.refresh()
    assert models.problems() == {}
    assert models.find("rows", "live")[0].version == 2


def test_a_running_server_keeps_its_signed_version(
    root: Path, launcher: Launcher, keys: tuple[Security, Security]
) -> None:
    secure = f"--security={keys[1].path}"
    serving = launcher.start(secure, "serve", "--port=0", "--poll=20ms", f"--root={root}", "--model=rows")
    address = serving.wait_for(r"ready at gRPC (\S+),")[1]
    aliases, second = root / "rows" / "aliases.json", root / "rows" / "v000002"
    good = (second / "manifest.json").read_text()
    with sr.ServingClient(address, refresh_sec=0.05) as client:
        attack(second, TABLES["dtype"][0])
        aliases.write_text('{"live": {"version": 2}}')
        wait_until(lambda: f"v000002/manifest.json: tables: {NOT_SIGNED}" in serving.err, "the field")
        assert client.lookup("user", KEYS).version == 1
        (second / "manifest.json").write_text(good)
        wait_until(lambda: client.version == 2, "the version as it was signed")
        aliases.write_text('{"live": {"version": 3}}')
        wait_until(lambda: client.version == 3, "the version with signed rows")
        np.testing.assert_array_equal(client.lookup("user", KEYS).rows, rows_of(3))
    assert serving.popen.poll() is None
    write_version(str(root), "plain", rows_of(1))
    ModelRegistry(str(root)).point("plain", "live", 1)
    refused = launcher.start(secure, "serve", "--port=0", f"--root={root}", "--model=plain").error_line()
    assert "plain/v000001/manifest.json: the file is not signed" in refused


def test_a_signing_key_changes_while_a_process_serves(tmp_path: Path, launcher: Launcher) -> None:
    """The order of docs/security.md, "Changing certificates and tokens"."""
    folder, root = tmp_path / "keys", tmp_path / "models"
    for name in ("former", "next"):
        init_signing_key(folder, name)
        (folder / f"{name}.yaml").write_text(f"signing_key: {name}.key\n")
    former, following = ((folder / f"{name}.pub").read_text() for name in ("former", "next"))
    (folder / "keys.pub").write_text(former)
    (folder / "reader.yaml").write_text("verification_key: keys.pub\n")
    write_version(str(root), "rows", rows_of(1), security=Security.load(folder / "former.yaml"))
    ModelRegistry(str(root)).point("rows", "live", 1)
    secure = f"--security={folder / 'reader.yaml'}"
    serving = launcher.start(secure, "serve", "--port=0", "--poll=20ms", f"--root={root}", "--model=rows")
    with sr.ServingClient(serving.wait_for(r"ready at gRPC (\S+),")[1], refresh_sec=0.05) as client:
        write_whole(folder / "keys.pub", former + following)
        time.sleep(2.0)  # the process looks at its files each second
        write_version(str(root), "rows", rows_of(2), security=Security.load(folder / "next.yaml"))
        ModelRegistry(str(root)).point("rows", "live", 2)
        wait_until(lambda: client.version == 2, "the version of the next key")
        write_whole(folder / "keys.pub", following)
        time.sleep(2.0)
        write_version(str(root), "rows", rows_of(3), security=Security.load(folder / "former.yaml"))
        ModelRegistry(str(root)).point("rows", "live", 3)
        wait_until(lambda: "no key of verification_key" in serving.err, "the refusal of the former key")
        assert client.version == 2
    assert serving.popen.poll() is None
