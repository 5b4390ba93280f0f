"""What a save of changes adds to, or whether it holds all rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.folder import Folder
from ....proto.errors import DataLoss, NotFound, SparserowError
from ..state.cluster import Cluster

log = logging.getLogger(__name__)

MOST_LINKS = 32  # checkpoints that one may need


@dataclass(frozen=True)
class Base:
    """What a save of changes adds to.

    Attributes:
        manifest: of the checkpoint since which rows count.
        needs: names of all that the save needs, the oldest first and this one last.
        full_bytes: of the rows of the oldest, which has all.
        since_full: saves since that one, with this one.
    """

    manifest: files.Manifest
    needs: tuple[str, ...]
    full_bytes: int
    since_full: int


def find_base(folder: Folder, cluster: Cluster, full_every: int) -> Base | None:
    """What the next save of a cluster may add what changed to; None: it holds all rows.

    All rows are due after so many saves as were asked for, and when what changed since weighs as much as they did.
    A chain that is as long as it may be is cut short: the save holds what changed since all rows were saved.
    """
    if full_every <= 1:
        return None
    shards = cluster.shards
    try:
        newest = files.read_manifest(folder)
        needs = files.needs_of(folder, newest)
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
        log.warning("%s: all rows are saved: %s", folder.url, error)
        return None
    full_bytes = newest.full_bytes if full is None else full.row_bytes
    if newest.chain_bytes >= full_bytes:
        return None
    if full is not None and len(needs) >= MOST_LINKS:
        return Base(full, (full.name,), full_bytes, newest.since_full + 1)
    return Base(newest, (*needs, newest.name), full_bytes, newest.since_full + 1)
