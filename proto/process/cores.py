"""The number of cores that this process may use, which in a container is less than the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Where the controller of CPU time is mounted: version 2, alone or beside version 1, and version 1.
_UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_VERSION_1 = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")


def available_cores(root: Path = Path("/")) -> int:
    """Returns the cores that this process may use, at least 1: its affinity, and the quotas of its cgroup rounded down.

    ``os.cpu_count`` is the number that the machine has. More threads than the quota's cores are stopped by the kernel
    until the next period, all of them at once.

    Args:
        root: the folder that has /proc and /sys.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the quotas of the process's cgroup and of those around it, in cores."""
    for line in _text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            for folder in _folders(root, _UNIFIED, group):
                yield from _quota(*(_text(folder / "cpu.max").split() or ["max"]))
        elif "cpu" in controllers.split(","):
            for folder in _folders(root, _VERSION_1, group):
                yield from _quota(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _folders(root: Path, mounts: tuple[str, ...], group: str) -> Iterator[Path]:
    """Yields the folders of a cgroup and of those around it; a container may see its own one alone, as the mount."""
    names = [name for name in PurePosixPath(group).parts[1:] if name != ".."]
    for mount in mounts:
        for depth in range(len(names) + 1):
            yield root.joinpath(mount, *names[:depth])


def _quota(quota: str, period: str = "") -> Iterator[float]:
    """Yields a quota in cores where there is one; "max", "-1" and "" are none."""
    if quota.strip().isdigit() and period.strip().isdigit() and int(period):
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
