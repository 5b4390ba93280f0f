"""Chooses where the tables of a job with placement ``auto`` are, by the figures of ``sparserow plan``."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...proto.config.job import JobConfig
from ..preflight.planning import Load, PlannedTable, plan_on_devices

if TYPE_CHECKING:
    import torch

    from ...worker.training.job_tables import ChoosePlacements, OpenTable
    from ...worker.training.process_group import WorkerGroup

log = logging.getLogger(__name__)


def placements_of(job: JobConfig, group: WorkerGroup, local_world: int) -> ChoosePlacements:
    """Returns what chooses the tables on devices; the first worker's choice counts for all.

    The choice depends on the whole memory of a device and not on what is free, so that a job that goes on from a
    checkpoint chooses again what it had.

    Args:
        job: the job.
        group: this worker and its peers.
        local_world: the number of workers that share this machine's memory.
    """
    load = Load(job.train.batch_size * job.train.accumulate, group.world)

    def choose(tables: Sequence[OpenTable]) -> Collection[str]:
        memory, used, chosen = _memory_of(group.device, local_world), 0, []
        for table in sorted(tables, key=lambda each: (each.rows * each.dim, each.path)):
            planned = PlannedTable(table.rows, table.dim, table.optimizer, table.dtype)
            there = plan_on_devices(planned, load, device_bytes=memory, used_bytes=used)
            log.info("table %s: placement %s, as %s", table.path, there.placement, there.reason)
            if there.placement == "device":
                chosen.append(table.path)
                used += there.rank_bytes
        return group.share(chosen if group.is_first else None, what="placement of tables") or []

    return choose


def _memory_of(device: torch.device, local_world: int) -> int:
    """Returns the memory of a worker's device in bytes; on the host, this worker's part of it."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_world
