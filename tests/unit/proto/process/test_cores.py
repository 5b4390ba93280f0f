"""How many cores a process may use: its affinity, and the quotas of its cgroups of either version."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from sparserow.deploy.preflight import health_checks
from sparserow.deploy.train import training_run
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import validate
from sparserow.proto.process.cores import available_cores
from sparserow.worker.api import connect as connecting
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.training_report import Silence

ROOMS = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 cores, of which the process may use 16."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 16),
        ({"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ({"sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "6400000 100000"}, 16),
        ({"sys/fs/cgroup/cpu.max": "damaged"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ({"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (
            {"proc/self/cgroup": "0::/a.slice/b\n", "sys/fs/cgroup/a.slice/b/cpu.max": "200000 100000"},
            2,
        ),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b\n",
                "sys/fs/cgroup/a.slice/cpu.max": "300000 100000",
                "sys/fs/cgroup/a.slice/b/cpu.max": "max 100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/x\n3:cpuset:/y\n2:cpu,cpuacct:/docker/1\n0::/\n",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (  # which sees its own cgroup as the mount
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/docker/1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
            },
            5,
        ),
    ],
)
def test_the_least_of_affinity_and_quotas_counts(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_cores(tmp_path) == cores
    assert health_checks.machine_facts(tmp_path).cores == cores, "doctor says the same"


class Seen(Exception):  # noqa: N818 - a signal
    pass


@pytest.mark.parametrize(("threads", "workers", "expected"), [(0, 1, (3, 3)), (0, 2, (1, 1)), (5, 1, (5, 3))])
def test_a_worker_has_threads_for_its_share_of_these_cores(
    monkeypatch: pytest.MonkeyPatch, threads: int, workers: int, expected: tuple[int, int]
) -> None:
    def connect(*_: Any, **__: Any) -> None:
        raise Seen

    monkeypatch.setattr(connecting, "connect", connect)
    monkeypatch.setattr(training_run, "available_cores", lambda: 3)
    before = torch.get_num_threads(), pa.cpu_count()
    data = {"format": "csv", "train": "a", "test": "b", "csv": {"label": 0}}
    job = validate(
        JobConfig,
        {
            "data": data,
            "features": {"c": {"kind": "id", "column": "column_1"}},
            "model": {"class": "DLRM", "args": {"rows": {"*": 1_000_000}}},
            "train": {"threads": threads},
            "publish": {"local": None},
        },
    )
    group, observer = WorkerGroup(), Silence()
    try:
        with pytest.raises(Seen):
            training_run.run_worker(job, group, local_world=workers, coordinator="host:1", observer=observer)
        assert (torch.get_num_threads(), pa.cpu_count()) == expected
    finally:
        torch.set_num_threads(before[0])
        pa.set_cpu_count(before[1])


def test_nothing_counts_the_cores_of_the_machine() -> None:
    """They are those of the host, whatever a container may use of them."""
    found = [
        f"{path.relative_to(ROOMS)}:{number}"
        for room in ("proto", "ps_server", "worker", "serving", "deploy")
        for path in sorted((ROOMS / room).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(os|multiprocessing)\.(process_)?cpu_count\(", line)
    ]
    assert not found, "proto/process/cores.py has the number"
