"""``sparserow doctor``: each thing that it looks at is broken once, and it says so with a remedy."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparserow as sr
from sparserow.deploy.cli import main
from sparserow.deploy.launch.security_files import init_security, sign_certificate
from sparserow.deploy.preflight import health_checks
from sparserow.deploy.preflight.finding import Finding
from sparserow.deploy.preflight.health_checks import (
    MachineFacts,
    check_disk,
    check_job,
    check_machine,
    check_ports,
)
from sparserow.deploy.preflight.peer_checks import check_certificates, check_cluster, slots_finding
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.security.security import Security
from sparserow_process import free_port

GOOD = MachineFacts(8, "madvise", 8 << 30, 65536, clock_is_synchronized=True, unix_sec=time.time())


def wrong(findings: Iterable[Finding], level: str = "wrong") -> str:
    """The only finding of this level, with a remedy."""
    found = [each for each in findings if each.level == level]
    assert len(found) == 1, found
    assert found[0].remedy
    return found[0].text


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"cores": 1}, "warning", "1 core"),
        ({"huge_pages": "never"}, "warning", "huge pages: never"),
        ({"available_bytes": 1 << 20}, "wrong", "1.0 MiB of memory are available, the budget is 4.0 GiB"),
        ({"files": 1024}, "wrong", "1024 open files are allowed"),
        ({"unix_sec": 0.0}, "wrong", "the clock says 1970-01-01"),
        ({"clock_is_synchronized": False}, "warning", "no service keeps the clock right"),
    ],
)
def test_a_machine_that_is_not_as_it_should_be(change: dict[str, object], level: str, words: str) -> None:
    assert {each.level for each in check_machine(GOOD, 4 << 30)} == {"ok"}
    assert words in wrong(check_machine(dataclasses.replace(GOOD, **change), 4 << 30), level)


def test_a_machines_facts_are_read(tmp_path: Path) -> None:
    facts = health_checks.machine_facts()
    assert facts.cores <= (os.cpu_count() or 1)
    assert facts.files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.available_bytes > 1 << 20
    for name, text in {  # of a container
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "sys/fs/cgroup/memory.max": "1073741824\n",
        "sys/fs/cgroup/memory.current": "73741824\n",
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable:   50000000 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = health_checks.machine_facts(tmp_path)
    assert (facts.cores, facts.available_bytes, facts.huge_pages) == (1, 1_000_000_000, "never")


def test_a_job_file(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("\t".join(["1", *["5"] * 13, *["ab"] * 26]) + "\n")
    text = "data: {{train: {0}/log.tsv, test: {0}/{1}}}\nmodel: {{class: DLRM, args: {{rows: {{'*': 1000000}}}}}}\n{2}"
    job = tmp_path / "job.yaml"
    job.write_text(text.format(tmp_path, "*.tsv", ""))
    assert {each.level for each in check_job(job)} == {"ok"}
    job.write_text(text.format(tmp_path, "none.tsv", ""))
    assert "data.test: " in wrong(check_job(job))
    job.write_text(text.format(tmp_path, "log.tsv", "trian: {}"))
    assert "trian" in wrong(check_job(job))


def test_the_data_of_a_job_file(tmp_path: Path) -> None:
    job, log = tmp_path / "job.yaml", tmp_path / "log.csv"
    columns = "csv: {header: true, label: click}"
    features = "features: {user: {kind: id}, age: {kind: dense}}\nmodel: {class: DLRM, args: {rows: {'*': 1000000}}}\n"
    text = f"data: {{format: csv, train: {log}, test: {log}, {columns}}}\n{features}"
    job.write_text(text)
    log.write_text("click,user,age\n1,7,30\n0,8,31\n")
    found = list(check_job(job))
    assert {each.level for each in found} == {"ok"}
    assert "2 data files have the job's columns" in found[-1].text
    log.write_text("click,usr,age\n1,7,30\n")
    assert f"features.user: no column 'user' in {log}; nearest: usr" in wrong(check_job(job))
    log.write_text("click,user,age\n1,7,old\n")
    assert "line 2, column age" in wrong(check_job(job))
    pq.write_table(pa.table({"click": [1, 0], "user": [7, 8], "age": [30, 31]}), log)
    assert f"{log}: it is a Parquet file, and not text" in wrong(check_job(job))
    log.write_bytes(b"click\0user\n")
    assert f"{log}: it holds zero bytes, and not text" in wrong(check_job(job))


def test_advice_names_no_section_that_a_job_file_lacks(tmp_path: Path) -> None:
    """The columns of Parquet are in data.columns, and an error may be of a feature."""
    job, log = tmp_path / "job.yaml", tmp_path / "log.parquet"
    pq.write_table(pa.table({"click": [1, 0], "user": [7, 8]}), log)
    columns = "columns: {label: clik}"
    job.write_text(
        f"data: {{format: parquet, train: {log}, test: {log}, {columns}}}\n"
        "features: {user: {kind: id}}\nmodel: {class: DLRM, args: {rows: {'*': 1000000}}}\n"
    )
    found = next(each for each in check_job(job) if each.level == "wrong")
    assert "data.columns.label: no column 'clik'" in found.text
    assert found.remedy == "correct the key that it names, or the file"


def test_too_few_slots_for_the_shards() -> None:
    assert list(slots_finding(16384, 256)) == []
    (finding,) = slots_finding(16384, 257)
    assert finding.level == "warning"
    assert finding.remedy == "make the next cluster with --slot-count=32768"


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot listen on" in wrong(check_ports([address]))
    assert [each.level for each in check_ports([address])] == ["ok"]
    with pytest.raises(InvalidArgument, match="--listen"):
        list(check_ports(["here"]))


def test_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # our own disk, or a CPU that others have, may be slow
        patch.setattr(health_checks, "time", SimpleNamespace(perf_counter=lambda: 0.0))
        assert [each.level for each in check_disk(tmp_path, 1)] == ["ok", "ok"]
    assert list(tmp_path.iterdir()) == []
    assert "there is no such folder" in wrong(check_disk(tmp_path / "none", 1))
    assert "1024.0 TiB are needed" in wrong(check_disk(tmp_path, 1 << 50))
    monkeypatch.setattr(health_checks.os, "fdatasync", lambda _: time.sleep(0.03))
    assert "a written block reaches the disk" in wrong(check_disk(tmp_path, 1), "warning")

    def refuse(_: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(health_checks.os, "fdatasync", refuse)
    assert "cannot be written: Read-only file system" in wrong(check_disk(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []


def test_certificates(tmp_path: Path) -> None:
    path = init_security(tmp_path / "s", ["127.0.0.1", "shard.example"], valid_sec=90 * 86400)
    security = Security.load(path)
    good = list(check_certificates(security, ["127.0.0.1", "shard.example"]))
    assert [each.level for each in good] == ["ok"] * 3
    assert {each.level for each in check_certificates(security, [])} == {"ok"}
    assert "mismatch" in wrong(check_certificates(security, ["other.example"]))
    now = time.time()
    assert "expires in 10 days" in wrong(check_certificates(security, [], now + 80 * 86400), "warning")
    assert "expired on" in wrong(check_certificates(security, [], now + 91 * 86400))
    assert "is valid from" in wrong(check_certificates(security, [], now - 86400))
    other = Security.load(init_security(tmp_path / "t", ["127.0.0.1"], valid_sec=90 * 86400))
    stranger = dataclasses.replace(security, authorities=other.authorities)
    assert "certificate" in wrong(check_certificates(stranger, []))
    sign_certificate(path.parent, "second", ["127.0.0.1"], valid_sec=90 * 86400)
    mixed = dataclasses.replace(security, key=(path.parent / "second.key").read_text())
    assert "mismatch" in wrong(check_certificates(mixed, []))
    assert {each.level for each in check_certificates(Security(), [])} == {"ok"}


def test_a_cluster_that_is_not_there() -> None:
    assert "cannot be reached" in wrong(check_cluster(f"127.0.0.1:{free_port()}", Security()))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_checks, "LEAST_FILES", 16)
    with sr.local_cluster(shards=2) as cluster:
        arguments = ["doctor", f"--coordinator={cluster.address}", f"--disk={tmp_path}", "--disk-bytes=1MiB"]
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json", str(tmp_path / "found.json")])
        assert ended.value.code == 0
        assert "nothing is wrong" in capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            main([*arguments, f"--listen={cluster.address}"])
        assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "1 of" in out
    assert "-> choose another port" in out
    findings = json.loads((tmp_path / "found.json").read_text())["findings"]
    areas = {each["area"] for each in findings}
    assert areas >= {"python", "packages", "core", "torch", "extra s3", "machine", "certificates", "disk", "cluster"}
    assert any("2 shards accept connections from here" in each["text"] for each in findings)
