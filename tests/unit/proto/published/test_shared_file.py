"""Version numbers and aliases that several processes take and move at once, on a local disk and on S3."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from s3_server import s3_bucket, s3_server
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import FailedPrecondition, NotFound, Unavailable
from sparserow.proto.published.dense import newest_number, write_dense
from sparserow.proto.published.manifest import MANIFEST, ModelManifest
from sparserow.proto.published.registry import CLAIM, ModelRegistry
from sparserow.proto.published.shared_file import SharedFile

AT_ONCE = 6


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of its own."""
    if request.param == "local":
        yield str(tmp_path)
        return
    with s3_server() as server, s3_bucket(server, monkeypatch) as bucket:
        yield f"s3://{bucket}/root"


def add_one(content: bytes | None) -> bytes:
    return b"%d" % (int(content or b"0") + 1)


def test_a_file_is_made_once(root: str) -> None:
    folder = Folder(root)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        made = list(threads.map(lambda n: folder.create("one", b"%d" % n), range(AT_ONCE)))
    assert made.count(True) == 1
    assert bytes(folder.read("one")) == b"%d" % made.index(True)
    folder.delete("one")
    folder.delete("one")
    assert not folder.exists("one")


def test_versions_have_numbers_of_their_own(root: str) -> None:
    registry = ModelRegistry(root)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        numbers = list(threads.map(lambda _: registry.claim_version("ctr"), range(2 * AT_ONCE)))
    assert sorted(numbers) == list(range(1, 2 * AT_ONCE + 1))
    registry.folder("ctr", 12).write("rows", [b"x"])
    registry.abandon("ctr", 12)
    assert registry.folder("ctr", 12).names() == [CLAIM]
    assert registry.claim_version("ctr") == 13, "the number of a publication that was given up stays used"
    version = registry.folder("ctr", 13)
    version.put(MANIFEST, _manifest(13))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        dense = list(threads.map(lambda step: write_dense(version, [b"abc"], step).number, range(AT_ONCE)))
    assert len(set(dense)) == AT_ONCE
    assert newest_number(version) == max(dense)


def test_dense_weights_that_another_process_writes_stay_until_they_are_given_up(tmp_path: Path) -> None:
    version = Folder(str(tmp_path))
    version.put(MANIFEST, _manifest(1))
    for number, age_sec in ((1, 0.0), (2, 7200.0)):
        claim = {"host": "h", "pid": 1, "time": time.time() - age_sec, "token": "t"}
        assert (version / "dense" / f"{number:06d}").create("claim.json", json.dumps(claim).encode())
    for step in range(4):
        write_dense(version, [b"abc"], step)
    assert (version / "dense").names() == ["000001", "000005", "000006"]


def test_a_folder_whose_claim_is_to_come_stays(tmp_path: Path) -> None:
    """A writer makes its folder, and then the claim in it; others that ended in between removed the folder."""
    version = Folder(str(tmp_path))
    version.put(MANIFEST, _manifest(1))
    (tmp_path / "dense" / "000001").mkdir(parents=True)
    for step in range(3):
        write_dense(version, [b"abc"], step)
    assert (version / "dense").names() == ["000001", "000003", "000004"]
    (tmp_path / "dense" / "000001" / "weights.safetensors").write_bytes(b"a rest")
    write_dense(version, [b"abc"], 3)
    assert (version / "dense").names() == ["000004", "000005"]


def test_a_version_that_was_removed_takes_no_dense_weights(tmp_path: Path) -> None:
    version = Folder(str(tmp_path)) / "v000001"
    with pytest.raises(NotFound, match="v000001: the version was removed, so it takes no dense weights"):
        write_dense(version, [b"abc"], 1)
    assert list(tmp_path.iterdir()) == []


def test_every_move_of_an_alias_counts(root: str) -> None:
    registry = ModelRegistry(root)
    for version in (1, 2):
        assert registry.claim_version("ctr") == version
        registry.folder("ctr", version).put(MANIFEST, _manifest(version))

    def move(number: int) -> None:
        for version in (1, 2, 1):
            ModelRegistry(root).point("ctr", f"alias-{number}", version)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(move, range(AT_ONCE)))
    aliases = registry.aliases("ctr")
    assert {name: (alias.version, alias.history) for name, alias in aliases.items()} == {
        f"alias-{number}": (1, (1, 2)) for number in range(AT_ONCE)
    }
    assert not [name for name in (registry.root / "ctr").names() if name.endswith(".claim")]


def test_a_count_by_many_is_exact(root: str) -> None:
    shared = SharedFile(Folder(root), "count")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda _: shared.change(add_one), range(4 * AT_ONCE)))
    assert shared.read() == b"%d" % (4 * AT_ONCE)


def test_a_claim_whose_process_is_gone_is_given_up(tmp_path: Path) -> None:
    shared = SharedFile(Folder(str(tmp_path)), "count", claim_sec=0.3)
    (tmp_path / "count.none.0.claim").write_text("of a process that was killed")
    shared.change(add_one)
    assert shared.read() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_a_process_that_was_held_up_changes_nothing_when_it_goes_on(tmp_path: Path) -> None:
    shared = SharedFile(Folder(str(tmp_path)), "count", claim_sec=0.3)
    has_claim, may_go_on = threading.Event(), threading.Event()

    def slow(_: bytes | None) -> bytes:
        has_claim.set()
        assert may_go_on.wait(60)
        return b"of long ago"

    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(shared.change, slow)
        assert has_claim.wait(60)
        shared.change(add_one)
        may_go_on.set()
        with pytest.raises(Unavailable, match="took too long; try again"):
            late.result(60)
    assert shared.read() == b"1"
    shared.change(add_one)
    assert shared.read() == b"2"


def test_a_change_that_fails_leaves_the_file_and_no_claim(tmp_path: Path) -> None:
    def refused(_: bytes | None) -> bytes:
        raise NotFound("no")

    with pytest.raises(NotFound):
        SharedFile(Folder(str(tmp_path / "ctr")), "aliases.json").change(refused)
    assert list((tmp_path / "ctr").iterdir()) == []


def test_a_model_that_does_not_exist_gets_no_folder(tmp_path: Path) -> None:
    registry = ModelRegistry(str(tmp_path))
    for ask in (
        lambda: registry.point("ctr", "live", 7),
        lambda: registry.canary("ctr", "live", 7, 0.5),
        lambda: registry.rollback("ctr", "live"),
        lambda: registry.prune("ctr", 1),
    ):
        with pytest.raises(NotFound, match="model 'ctr'"):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_a_prune_removes_what_a_killed_publication_left(tmp_path: Path) -> None:
    registry = ModelRegistry(str(tmp_path))
    for number, age_sec in ((1, 90_000.0), (2, 0.0)):
        assert registry.claim_version("ctr") == number
        folder = registry.folder("ctr", number)
        folder.put(CLAIM, json.dumps({"time": time.time() - age_sec}).encode())
        folder.write("rows", [b"x"])
    assert registry.prune("ctr", 1) == [1]
    assert registry.folder("ctr", 1).names() == [CLAIM], "its number stays used"
    assert "rows" in registry.folder("ctr", 2).names(), "the second one may still be written"
    assert registry.prune("ctr", 1) == []


def test_a_publication_whose_files_were_removed_is_not_completed(tmp_path: Path) -> None:
    registry = ModelRegistry(str(tmp_path))
    registry.claim_version("ctr")
    manifest = ModelManifest.from_json(_manifest(1), "manifest")
    with pytest.raises(FailedPrecondition, match=r"slots\.safetensors: was removed while the version was published"):
        registry.finish(manifest)
    registry.folder("ctr", 1).write("slots.safetensors", [b"x"])
    registry.finish(manifest)
    assert registry.versions("ctr") == [1]


def test_what_is_pruned_is_none_before_another_alias_can_move_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = ModelRegistry(str(tmp_path))
    for version in (1, 2, 3):
        registry.claim_version("ctr")
        registry.folder("ctr", version).put(MANIFEST, _manifest(version))
    registry.point("ctr", "live", 3)
    moved = threading.Event()
    errors: list[Exception] = []

    def move() -> None:
        try:
            ModelRegistry(str(tmp_path)).point("ctr", "old", 1)
        except NotFound as error:
            errors.append(error)
        moved.set()

    versions_of = ModelRegistry.versions
    movers: list[threading.Thread] = []

    def versions(self: ModelRegistry, model: str) -> list[int]:
        found = versions_of(self, model)
        if not movers:  # prune has read the aliases, and has removed nothing yet
            movers.append(threading.Thread(target=move, daemon=True))
            movers[0].start()
        return found

    monkeypatch.setattr(ModelRegistry, "versions", versions)
    gone = registry.prune("ctr", 1)
    assert moved.wait(60)
    named = {alias.version for alias in registry.aliases("ctr").values()}
    assert named <= set(versions_of(registry, "ctr")), "an alias names what is there"
    assert (len(errors) == 1) == (1 in gone)


def _manifest(version: int) -> bytes:
    slots = {"file": "slots.safetensors", "bytes": 0, "xxh3": "0", "sha256": "0"}
    names = {"model": "ctr", "namespace": "ads", "cluster_id": "9", "created": "2026-01-01T00:00:00+00:00"}
    facts = {"format": 1, "version": version, "slot_count": 64, "tables": [], "program": None, "card": {}}
    return json.dumps({**names, **facts, "slots": slots}).encode()
