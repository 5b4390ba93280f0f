"""Files that commands write for other programs are there whole, or as they were."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparserow.deploy.bench.harness import Figure, write_json
from sparserow.deploy.commands.result_file import write_result
from sparserow.proto.errors import ResourceExhausted
from sparserow.proto.process.whole_file import write_whole
from sparserow.worker.session.tracing import write_trace

WRITERS: dict[str, Callable[[Path], None]] = {
    "--json": lambda path: write_result(path, {"rows": 1}),
    "bench --json": lambda path: write_json(path, [Figure("rows", 1.0, "rows")]),
    "--trace": lambda path: write_trace(path, [{"name": "pull"}]),
}


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Lets no file of this process grow beyond 1,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("option", WRITERS)
def test_a_reader_of_the_file_before_reads_it_to_its_end(option: str, tmp_path: Path):
    path = tmp_path / "result.json"
    path.write_text("before")
    with path.open() as reader:
        WRITERS[option](path)
        assert reader.read() == "before"
    assert path.read_text() != "before"
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("before", [None, "before"])
def test_a_disk_that_is_full_leaves_the_file_as_it_was(before: str | None, tmp_path: Path, full_disk: None):
    path = tmp_path / "result.json"
    if before is not None:
        path.write_text(before)
    with pytest.raises(ResourceExhausted, match=r"result\.json: the file cannot be written: File too large"):
        write_whole(path, "x" * 5000)
    assert [name.read_text() for name in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there" / "result.json")
    write_whole(link, "after")
    assert link.is_symlink()
    assert (tmp_path / "there" / "result.json").read_text() == "after"


def test_what_a_killed_writer_left_is_replaced_with_the_mode_asked_for(tmp_path: Path):
    path = tmp_path / "token"
    (tmp_path / f".token.{os.getpid()}.part").write_text("left")
    write_whole(path, "secret", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["token"]
