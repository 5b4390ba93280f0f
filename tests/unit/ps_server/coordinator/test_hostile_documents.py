"""Documents that become far more than they say: YAML aliases, brackets, archives; and texts that hold secrets."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config
from sparserow.proto.options.strict_model import StrictModel
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.security import Security, use_security
from sparserow.ps_server.coordinator.procedures.checkpoint_save import config_of
from sparserow.worker.membership.fault_report import without_credentials
from sparserow.worker.row_files.matrices import _check_inflation

MIB = 1 << 20


class Anything(StrictModel):
    a: object = None


def laughs(levels: int) -> str:
    """Each level names the one before nine times."""
    lines = ["l0: &l0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "a:\n  " + "\n  ".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (laughs(9), "more than 200000 values with its aliases"),
        ("a: " + "[" * 100_000, "nested too deep"),
        ("a: " + "[" * 60 + "]" * 60, "nested too deep; allowed: 50 levels"),
        ("a: " + "{b: " * 5_000 + "1" + "}" * 5_000, "nested too deep"),
        ("a: &x [*x]", "an alias stands within what it names"),
        ("a: &x {b: 1, <<: *x}", "an alias stands within what it names"),
        ("a: " + "x" * (5 * MIB), "the file is too large; allowed: at most 4194304 bytes"),
    ],
)
def test_a_yaml_file_is_bounded_as_it_would_be_written_out(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        load_config(Anything, tmp_path / "job.yaml")


def test_aliases_and_merges_work_within_the_bounds(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a:\n  base: &base {x: 1, y: 2}\n  more: {<<: *base, z: 3}\n  same: *base\n")
    loaded = load_config(Anything, tmp_path / "job.yaml")
    assert loaded.a == {"base": {"x": 1, "y": 2}, "more": {"x": 1, "y": 2, "z": 3}, "same": {"x": 1, "y": 2}}


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"a": "' + "x" * 2 * MIB + '"}'])
def test_a_configuration_that_a_worker_sends_is_bounded(text: str) -> None:
    with pytest.raises(InvalidArgument, match="config_json"):
        config_of(text)


def test_an_archive_that_inflates_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    data = io.BytesIO()
    np.save(data, np.zeros((1, 1)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("user.npy", data.getvalue() + bytes(64 * MIB))
    with pytest.raises(ValueError, match=r"inflates \d+ bytes to .*; allowed: 256 times as many"):
        _check_inflation(path)
    np.savez_compressed(path, user=np.random.default_rng(1).normal(size=(1000, 16)).astype(np.float32))
    _check_inflation(path)


def test_a_fault_holds_no_token(tmp_path: Path) -> None:
    write_whole(tmp_path / "token", "s3cr3t-of-this-process", mode=0o600)
    (tmp_path / "security.yaml").write_text("token_file: token\ntoken_in_clear: true\n")
    use_security(Security.load(tmp_path / "security.yaml"))
    try:
        text = without_credentials(
            "open s3://user:hunter2@bucket/x failed with s3cr3t-of-this-process\n"
            "headers={'Authorization': 'Bearer abcdef.ghi'}, api_key='k-123456', AWS_SECRET_ACCESS_KEY=zzzzzz\n"
            "GET /x?signature=0123abcd&part=7 line 12, in tokens_of(batch)"
        )
    finally:
        use_security(None)
    for secret in ("hunter2", "s3cr3t", "abcdef", "k-123456", "zzzzzz", "0123abcd"):
        assert secret not in text
    for kept in ("s3://", "bucket/x", "part=7", "line 12, in tokens_of(batch)"):
        assert kept in text


def test_a_token_is_not_sent_in_clear_unless_told(tmp_path: Path) -> None:
    write_whole(tmp_path / "token", "secret", mode=0o600)
    (tmp_path / "security.yaml").write_text("token_file: token\n")
    with pytest.raises(InvalidArgument, match="token_file without ca would send the token in clear"):
        Security.load(tmp_path / "security.yaml")
    (tmp_path / "security.yaml").write_text("token_file: token\ntoken_in_clear: true\n")
    assert Security.load(tmp_path / "security.yaml").token == "secret"
