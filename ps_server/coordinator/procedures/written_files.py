"""The files that the shards write for a save, and the manifest that makes a checkpoint of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ....proto import control_pb2 as pb
from ....proto.checkpoint import manifest as files
from ..state.cluster import Cluster
from ..state.shards import Shard
from .membership_change import CutPoint
from .save import Save


class WrittenFiles:
    """The files of a save, as the shards report them one by one.

    Args:
        save: the save, whose rows and bytes are counted.
        cluster: the cluster that is saved.
    """

    def __init__(self, save: Save, cluster: Cluster) -> None:
        self._save, self._cluster = save, cluster
        self._schemas = {schema.id: schema for schema in cluster.registry.tables()}
        self._parts: dict[int, list[files.PartEntry]] = {table_id: [] for table_id in self._schemas}
        self._slots: list[files.SlotsEntry] = []
        self._stats: dict[str, int] = {}

    def add(self, shard: Shard, reply: pb.DumpReply) -> None:
        """Adds a file that a shard has written, or its statistics.

        Args:
            shard: the shard.
            reply: what it reports.
        """
        if reply.HasField("rows"):
            file = reply.rows.file
            for part in reply.rows.parts:
                entry = files.PartEntry(
                    file=file.file,
                    bytes=file.bytes,
                    xxh3=file.xxh3,
                    shard=shard.index,
                    first_slot=part.first_slot,
                    end_slot=part.end_slot,
                    rows=part.rows,
                )
                self._parts.setdefault(part.table_id, []).append(entry)
                self._save.rows += part.rows
            self._save.bytes += file.bytes
        elif reply.HasField("slots"):
            first_slot, end_slot = self._cluster.slots.bounds_of(shard.index)
            facts = reply.slots
            self._slots.append(files.SlotsEntry(facts.file, facts.bytes, facts.xxh3, first_slot, end_slot))
        else:
            for name in ("rows_saved", "side_bytes_most", "writes_stalled"):
                self._stats[name] = self._stats.get(name, 0) + getattr(reply.stats, name)

    def manifest(self, points: Sequence[CutPoint], cuts: Sequence[pb.CutReply]) -> files.Manifest:
        """Returns the manifest of all files that were added.

        Args:
            points: the points where the jobs were cut.
            cuts: the replies of the shards to the cut.
        """
        save = self._save
        windows = [json.loads(cut.windows_json) for cut in cuts]
        rosters = self._cluster.rosters
        jobs = [
            files.JobEntry(
                job_id=point.job_id,
                name=rosters[point.job_id].name if point.job_id in rosters else "",
                staleness=point.staleness,
                generation=rosters[point.job_id].generation if point.job_id in rosters else 0,
                step=point.step,
                sequences=tuple((*key, sequence) for key, sequence in point.sequences.items()),
                windows=tuple(of_shard[index] for of_shard in windows),
                data=save.data.get(point.job_id, {}),
            )
            for index, point in enumerate(points)
        ]
        base = save.base
        return files.Manifest(
            base="" if base is None else base.manifest.name,
            chain=0 if base is None else len(base.needs),
            chain_bytes=0 if base is None else base.manifest.chain_bytes + save.bytes,
            needs=() if base is None else base.needs,
            full_bytes=0 if base is None else base.full_bytes,
            since_full=0 if base is None else base.since_full,
            name=save.name,
            created=files.now_text(),
            cluster_id=self._cluster.cluster_id,
            slot_count=self._cluster.slots.slot_count,
            shards=len(self._cluster.shards.shards),
            lineage=self._cluster.shards.lineage,
            tables=tuple(
                files.TableEntry(
                    self._schemas[table_id], tuple(sorted(found, key=lambda part: (part.shard, part.first_slot)))
                )
                for table_id, found in self._parts.items()
                if table_id in self._schemas
            ),
            slots=tuple(sorted(self._slots, key=lambda facts: facts.file)),
            jobs=tuple(jobs),
            workers=tuple(sorted(filter(None, save.entered.values()), key=lambda entry: entry.rank)),
            job=save.job_id,
            config=save.config,
            stats=self._stats,
        )
