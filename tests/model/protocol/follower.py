"""A follower of all shards: asks from its cursor, applies what is newer, replaces on a snapshot."""

from __future__ import annotations

from typing import Any

from . import frames as f


class Follower:
    name = "f"

    def __init__(self, shards: list[str], bugs: frozenset[str]) -> None:
        self.shards, self.bugs = shards, bugs
        self.start()

    def start(self) -> None:
        self.rows: dict[str, dict[int, f.Row]] = {shard: {} for shard in self.shards}
        self.cursor: dict[str, f.Version] = dict.fromkeys(self.shards, (0, 0))

    def tick(self) -> list[Any]:
        return [f.Sync(self.name, shard, self.cursor[shard]) for shard in self.shards]

    def receive(self, frame: Any) -> list[Any]:
        if isinstance(frame, f.Snapshot):
            self._replace(frame)
        else:
            self._merge(frame)
        return []

    def _replace(self, frame: f.Snapshot) -> None:
        if frame.end > self.cursor[frame.src]:
            self.rows[frame.src] = dict(frame.rows)
            self.cursor[frame.src] = frame.end

    def _merge(self, frame: f.Delta) -> None:
        lineage, seen = self.cursor[frame.src]
        if frame.end[0] != lineage and "abandoned_delta" not in self.bugs:
            return  # of a branch that a restore abandoned
        rows = self.rows[frame.src]
        for key, row in frame.rows.items():
            if row[0] > rows.get(key, f.ABSENT)[0]:
                rows[key] = row
        if frame.end[0] == lineage and frame.begin[1] <= seen < frame.end[1]:
            self.cursor[frame.src] = frame.end
