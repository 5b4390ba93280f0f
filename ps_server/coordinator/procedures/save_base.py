"""Decides whether a save holds all rows, or the changes since a base checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.folder import Folder
from ....proto.errors import DataLoss, NotFound, SparserowError
from ..state.cluster import Cluster

log = logging.getLogger(__name__)

MOST_LINKS = 32  # the largest number of checkpoints that a save may need


@dataclass(frozen=True)
class Base:
    """The checkpoint whose changes a save holds.

    Attributes:
        manifest: the manifest of that checkpoint.
        needs: the names of all checkpoints that the save needs, the oldest first and this one last.
        full_bytes: the size of the row files of the oldest, which has all rows.
        since_full: the number of saves since the oldest, including the new one.
    """

    manifest: files.Manifest
    needs: tuple[str, ...]
    full_bytes: int
    since_full: int


def find_base(folder: Folder, cluster: Cluster, full_every: int) -> Base | None:
    """Returns the base of the next save of a cluster; None when the save has to hold all rows.

    All rows are due after ``full_every`` saves, and when the changes since are as large as all rows were. A chain of
    the greatest length is cut short: the save then holds the changes since all rows were saved.
    """
    if full_every <= 1:
        return None
    shards = cluster.shards
    try:
        newest = files.read_manifest(folder)
        needs = newest.needs
        damaged = files.damaged_in(folder).intersection([*needs, newest.name])
        if damaged:
            raise DataLoss(f"{', '.join(sorted(damaged))} was found damaged, and {newest.name} is or needs it")
        missing = set(needs).difference(folder.names())
        if missing:
            raise DataLoss(f"{newest.name} adds to {', '.join(sorted(missing))}, which is missing")
        is_ours = newest.cluster_id == cluster.cluster_id and newest.lineage == shards.lineage
        if not is_ours or newest.shards != len(shards.shards) or newest.since_full + 1 >= full_every:
            return None
        full = newest if not needs else None
        if full is None and (not newest.full_bytes or len(needs) >= MOST_LINKS):
            full = files.read_manifest(folder, needs[0])
    except NotFound:
        return None
    except SparserowError as error:
        log.warning("%s: the save holds all rows: %s", folder.url, error)
        return None
    full_bytes = newest.full_bytes if full is None else full.row_bytes
    if newest.chain_bytes >= full_bytes:
        return None
    if full is not None and len(needs) >= MOST_LINKS:
        return Base(full, (full.name,), full_bytes, newest.since_full + 1)
    return Base(newest, (*needs, newest.name), full_bytes, newest.since_full + 1)
