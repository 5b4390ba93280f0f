"""What must hold after every event of the protocol model, and at its end.

The checker keeps its own record of the truth: what workers decided to commit, in which order, with which content, and
which epochs were closed at which sequence. It never asks a shard's window.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from protocol import frames as f
from protocol.shard import KEYS, Applied, Shard


class ViolationError(Exception):
    """The protocol broke a promise."""


def require(holds: bool, text: str, *details: Any) -> None:
    if not holds:
        raise ViolationError(" ".join([text, *map(repr, details)]))


def replay(applied: list[Applied]) -> dict[int, Any]:
    """Rows after these commits, the straightforward way: one update at a time. None = deleted."""
    rows: dict[int, Any] = {}
    for entry in applied:
        for key in KEYS:
            for commit, part in zip(entry.ids, entry.parts, strict=True):
                if key in part.keys:
                    rows[key] = (rows.get(key) or ()) + ((*commit, part.tag, entry.scale),)
            if any(key in part.deleted for part in entry.parts):
                rows[key] = None
    return rows


class Checker:
    """The witness of one run (see worker.Witness) and the judge of its states."""

    def __init__(self, staleness: int | None, quorum: int | None = None) -> None:
        self.staleness, self.quorum = staleness, quorum
        self.contents: dict[f.CommitId, tuple[int, dict[str, f.Part]]] = {}
        self.valid: dict[f.Pair, list[f.CommitId]] = {}  # per epoch, in order
        self.finals: dict[f.Pair, int] = {}  # closed epochs: the last sequence that may be applied
        self.aborts: set[f.CommitId] = set()  # every shard acknowledged it, or the worker believes so
        self.refused: dict[str, set[f.CommitId]] = {}  # per shard: whose COMMIT it answered with Fenced
        self.done: list[tuple[f.CommitId, int]] = []  # steps whose commit every shard acknowledged
        self.reduced: dict[int, tuple[tuple[f.CommitId, ...], int]] = {}  # staleness 0: what each step was
        self.scales: dict[str, dict[f.CommitId, int]] = {}  # per shard, of what it has now
        self._seen: dict[str, tuple[int, int]] = {}
        self.pulls = self.parked_out = self.refusals = 0
        self.views: dict[tuple[f.Pair, int], dict[str, list[int]]] = {}  # of pulls, by shard: the steps that they saw

    # Witness

    def decided(self, commit: f.CommitId, step: int, parts: dict[str, f.Part]) -> None:
        require(commit not in self.contents, "a sequence was used for two contents", commit)
        self.contents[commit] = (step, parts)
        if self.quorum is None:
            self._make_valid(commit)

    def _make_valid(self, commit: f.CommitId) -> None:
        pair = commit[:2]
        if commit[2] <= self.finals.get(pair, commit[2]):
            self.valid.setdefault(pair, []).append(commit)

    def aborted(self, commit: f.CommitId) -> None:
        is_valid = commit in self.valid.get(commit[:2], [])
        require(not is_valid or self.quorum is None, "a member of a step has given its commit up", commit)
        self.aborts.add(commit)

    def outside(self, commit: f.CommitId, step: int, open_step: int) -> None:
        self.refusals += 1
        require(open_step > step, "who is outside of a step is sent back to it", commit, step, open_step)
        require(commit not in self.valid.get(commit[:2], []), "a member of a step was told that it is none", commit)

    def unprepared(self, commit: f.CommitId, shard: str) -> None:
        raise ViolationError(f"a decided commit found nothing prepared: {commit} on {shard}")

    def fenced(self, commit: f.CommitId, shard: str) -> None:
        self.refused.setdefault(shard, set()).add(commit)

    def finished(self, commit: f.CommitId, step: int) -> None:
        if commit in self.valid.get(commit[:2], []):  # else its step was rolled back before the answer came
            self.done.append((commit, step))

    def waited(self, step: int, waits_for: tuple[int, ...]) -> None:
        self.parked_out += 1
        require(bool(waits_for), "a deadline names nobody", step)

    def closed(self, worker: f.Pair, final: f.WindowState) -> None:
        self.finals[worker] = final.committed
        self.valid[worker] = [commit for commit in self.valid.get(worker, []) if commit[2] <= final.committed]

    def rolled_back(self, step: int, closed: set[f.Pair]) -> None:
        """Nothing after the cut survives, and no epoch of the abandoned branch may commit again."""
        for pair, commits in self.valid.items():
            self.valid[pair] = [commit for commit in commits if self.contents[commit][0] <= step]
        for pair in closed:
            self.finals[pair] = max((commit[2] for commit in self.valid.get(pair, [])), default=0)
        self.done = [(commit, at) for commit, at in self.done if at <= step]
        self.reduced = {at: entry for at, entry in self.reduced.items() if at <= step}

    def pulled(self, worker: f.Pair, step: int, view: dict[int, f.Row], rows: f.Rows) -> None:
        self.pulls += 1
        require(view == rows.ghost_truth, "a conditional pull gave another row than the shard has", worker, step, rows)
        entries: tuple[Applied, ...] = rows.ghost_seen
        if self.quorum is not None:  # a late worker may see later steps; it is a member of none of those
            self.views.setdefault((worker, step), {})[rows.src] = [entry.step for entry in entries]
        elif self.staleness == 0:
            steps = [entry.step for entry in entries]
            require(steps == list(range(step)), "a pull must see exactly the steps before its own", worker, step, steps)
        elif self.staleness is not None:
            self._check_bound(worker, step - 1 - self.staleness, entries, rows)

    def _check_bound(self, worker: f.Pair, bound: int, entries: tuple[Applied, ...], rows: f.Rows) -> None:
        last: dict[f.Pair, int] = {}
        for entry in entries:
            last[entry.ids[0][:2]] = entry.step
        for pair, span in rows.ghost_members.items():
            if span.until is None and span.first <= bound:
                seen = last.get(pair, -1)
                require(
                    seen >= bound, "a pull broke the bound: (worker, bound, of whom, seen)", worker, bound, pair, seen
                )

    # After every event

    def check_shard(self, shard: Shard) -> None:
        for pair, held in shard.prepared.items():
            require((*pair, held.seq) not in self.aborts, "an aborted sequence holds memory", shard.name, held)
        if self.quorum is not None and shard.name == "s0":
            self._note_members(shard)
        now = (shard.loads, len(shard.applied))
        if self._seen.get(shard.name) == now:
            return
        before = self._seen.get(shard.name, (-1, 0))
        self._seen[shard.name] = now
        rows = {key: row[1] for key, row in shard.rows.items()}
        require(rows == replay(shard.applied), "rows are not the replay of the commits", shard.name, rows)
        self._check_order(shard)
        if before[0] != now[0]:
            self.scales[shard.name] = {}
        new = shard.applied[before[1] :] if before[0] == now[0] else shard.applied
        for entry in new:
            self._check_entry(shard, entry)
            if self.quorum is not None and before[0] == now[0]:
                self._check_members(shard, entry)

    def _note_members(self, shard: Shard) -> None:
        """With a quorum a commit counts from when the naming shard has taken it."""
        taken = [commit for entry in shard.applied for commit in entry.ids]
        taken += [commit for step in sorted(shard.kept) for commit, _ in shard.kept[step].values()]
        for commit in taken:
            if commit not in self.valid.get(commit[:2], []):
                self._make_valid(commit)

    def _check_members(self, shard: Shard, entry: Applied) -> None:
        """A step has its quorum, or all workers where fewer count; each saw exactly the steps before."""
        spans = shard.members.values()
        counted = sum(span.first <= entry.step and (span.until is None or entry.step <= span.until) for span in spans)
        wanted = min(self.quorum or counted, counted)
        require(len(entry.ids) == wanted, "a step has another number of members", shard.name, entry, wanted)
        require(entry.scale == wanted, "gradients are divided by another number", shard.name, entry, wanted)
        for commit in entry.ids:
            steps = self.views[commit[:2], entry.step][shard.name]
            wrong = "a member must see exactly the steps before its own"
            require(steps == list(range(entry.step)), wrong, shard.name, commit, steps)

    def _check_order(self, shard: Shard) -> None:
        """Each epoch's commits: its own decided ones, from the first, none missing, none twice, in order."""
        counts: Counter[f.Pair] = Counter()
        for entry in shard.applied:
            for commit in entry.ids:
                valid = self.valid.get(commit[:2], [])
                place = counts[commit[:2]]
                require(
                    place < len(valid), "a commit that nobody may apply: fenced, abandoned or twice", shard.name, commit
                )
                require(
                    valid[place] == commit,
                    "out of order or missing: (shard, got, wanted)",
                    shard.name,
                    commit,
                    valid[place],
                )
                counts[commit[:2]] += 1
        if self.staleness == 0:
            steps = [entry.step for entry in shard.applied]
            require(steps == list(range(len(steps))), "steps out of order", shard.name, steps)

    def _check_entry(self, shard: Shard, entry: Applied) -> None:
        for commit, part in zip(entry.ids, entry.parts, strict=True):
            step, parts = self.contents[commit]
            require(step == entry.step, "a commit in another step", shard.name, commit)
            require(parts[shard.name] == part, "the content of another try was applied", shard.name, commit, part)
            self.scales[shard.name][commit] = entry.scale
            scales = {of.get(commit, entry.scale) for of in self.scales.values()}
            require(len(scales) == 1, "shards scale one commit differently", shard.name, commit, scales)
        if self.staleness == 0:
            require(list(entry.ids) == sorted(entry.ids), "not reduced in rank order", shard.name, entry.ids)
            reduced = self.reduced.setdefault(entry.step, (entry.ids, entry.scale))
            require(
                reduced == (entry.ids, entry.scale), "shards reduced a step differently", shard.name, entry, reduced
            )

    def check_follower(self, shard: Shard, rows: dict[int, f.Row], cursor: f.Version) -> None:
        if shard.serving and cursor == (shard.lineage, shard.sequence):
            require(rows == shard.rows, "a follower at the source's cursor differs", shard.name, rows, shard.rows)

    # At the end

    def check_end(self, shards: list[Shard], lost: dict[tuple[str, f.Pair], int], recoveries: int) -> None:
        for shard in shards:
            require(not shard.prepared, "a reservation leaked", shard.name, shard.prepared)
            require(not shard.kept and not shard.parked, "commits or pulls left over", shard.name, shard.kept)
            applied = {commit for entry in shard.applied for commit in entry.ids}
            told = applied & self.refused.get(shard.name, set())
            require(not told, "Fenced was said of a COMMIT that is applied: (shard, which)", shard.name, told)
            counts = Counter(commit[:2] for entry in shard.applied for commit in entry.ids)
            for pair, commits in self.valid.items():
                missing = len(commits) - counts[pair]
                counted = lost.get((shard.name, pair), 0)
                require(missing == counted, "commits lost and not counted: (shard, whose, missing, counted)",
                        shard.name, pair, missing, counted)  # fmt: skip
                may_lose = self.staleness != 0 and shard.incarnation > 1
                require(
                    not missing or may_lose, "lost without a restore: applied on some shards only", shard.name, pair
                )
        if not recoveries:
            kept = {commit for commits in self.valid.values() for commit in commits}
            for commit, _ in self.done:
                require(commit in kept, "an acknowledged step vanished", commit)
