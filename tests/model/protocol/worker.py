"""A worker: pull, prepare, commit or abort, one step after the other; recovery after each kind of refusal.

A pure state machine. It has at most one sequence in doubt: the next one is prepared only when every shard answered the
last. After the decision to commit it never aborts that sequence; it sends it again until it is acknowledged or fenced.
"""

from __future__ import annotations

from typing import Any, Protocol

from . import frames as f
from .shard import KEYS


class Witness(Protocol):
    """Told what the state machines decide; they never read it."""

    def decided(self, commit: f.CommitId, step: int, parts: dict[str, f.Part]) -> None: ...
    def pulled(self, worker: f.Pair, step: int, view: dict[int, f.Row], rows: f.Rows) -> None: ...
    def finished(self, commit: f.CommitId, step: int) -> None: ...
    def aborted(self, commit: f.CommitId) -> None: ...
    def outside(self, commit: f.CommitId, step: int, open_step: int) -> None: ...
    def unprepared(self, commit: f.CommitId, shard: str) -> None: ...
    def fenced(self, commit: f.CommitId, shard: str) -> None: ...
    def waited(self, step: int, waits_for: tuple[int, ...]) -> None: ...
    def closed(self, worker: f.Pair, final: f.WindowState) -> None: ...
    def rolled_back(self, step: int, closed: set[f.Pair]) -> None: ...


def part_of(worker: int, step: int, shard: int, tag: int) -> f.Part:
    """The gradients of a step for a shard: some of its keys, none at times, a deletion at times."""
    choice = (worker + 2 * step + 3 * shard) % 5
    keys = () if choice == 4 else KEYS if choice < 2 else (KEYS[choice - 2],)
    deleted = (KEYS[0],) if (3 * worker + step + shard) % 7 == 5 else ()
    return f.Part(tag, keys, deleted)


class Worker:
    def __init__(
        self,
        worker: int,
        shards: list[str],
        last_step: int,
        witness: Witness,
        bugs: frozenset[str],
        *,
        has_quorum: bool = False,
    ) -> None:
        self.worker, self.name = worker, f"w{worker}"
        self.shards, self.last_step = shards, last_step
        self.witness, self.bugs = witness, bugs
        self.has_quorum = has_quorum
        self.nonce, self.req, self.tag = 0, 0, 0
        self.phase = "down"
        self.was_aborted = False
        self.wants_to_leave = False

    # Life

    def start(self) -> list[Any]:
        """A fresh process: asks for an epoch."""
        self.nonce += 1
        self.epoch = self.route = self.seq = self.step = 0
        self.cache: dict[str, dict[int, f.Row]] = {shard: {} for shard in self.shards}
        self.held: dict[int, tuple[int, dict[str, f.Part]]] = {}  # decided, not yet in a durable cut
        self.open_step = 0  # as a shard said that refused this worker's step
        self.waiting: dict[str, Any] = {}
        return self._register()

    def crash(self) -> None:
        self.phase, self.waiting = "down", {}

    @property
    def busy(self) -> bool:
        return self.phase not in ("down", "left")

    def receive(self, frame: Any) -> list[Any]:
        return HANDLERS[type(frame)](self, frame) if self.busy else []

    def tick(self) -> list[Any]:
        """Sends again what is not answered."""
        if self.phase == "joining":
            return self._register()
        if self.phase == "leaving":
            return [f.Leave(self.name, "c", self.epoch, self.route)]
        if self.phase == "rerouting":
            return [f.GetRoute(self.name, "c")]
        if self.phase == "committing" and "abort_after_commit" in self.bugs:
            return self._abort()
        if self.phase == "aborting" and "lost_abort" in self.bugs:
            return self._aborted()
        return list(self.waiting.values())

    # Membership

    def _register(self) -> list[Any]:
        self.phase, self.waiting = "joining", {}
        return [f.Register(self.name, "c", self.nonce, self.epoch)]

    def on_welcome(self, frame: f.Welcome) -> list[Any]:
        if self.phase != "joining" or frame.nonce != self.nonce or frame.epoch <= self.epoch:
            return []
        self.epoch, self.route, self.step, self.seq = frame.epoch, frame.route, frame.step, 0
        self.open_step = 0
        self.held = {}
        return self._next()

    def on_refused(self, frame: f.Refused) -> list[Any]:
        if self.phase != "joining" or frame.nonce != self.nonce:
            return []
        self.nonce += 1
        self.epoch = 0
        return self._register()

    def on_leave_reply(self, frame: f.LeaveReply) -> list[Any]:
        if self.phase != "leaving" or frame.epoch != self.epoch:
            return []
        if frame.code == f.STALE_ROUTE:
            return self._reroute()
        if frame.code:
            return self._register()
        self.phase = "left"
        return []

    # The step

    def _ask(self, phase: str, make: Any, shards: list[str] | None = None) -> list[Any]:
        self.phase, self.waiting = phase, {}
        for shard in self.shards if shards is None else shards:
            self._send(shard, make)
        return list(self.waiting.values())

    def _send(self, shard: str, make: Any) -> Any:
        self.req += 1
        self.waiting[shard] = make(shard, self.req)
        return self.waiting[shard]

    def _next(self) -> list[Any]:
        if self.step > self.last_step or self.wants_to_leave:
            self.phase, self.waiting = "leaving", {}
            return self.tick()
        return self._pull()

    def _make_pull(self, shard: str, req: int) -> f.Pull:
        have = {key: row[0] for key, row in self.cache[shard].items()}
        return f.Pull(self.name, shard, req, self.worker, self.epoch, self.route, self.step, have)

    def _pull(self) -> list[Any]:
        return self._ask("pulling", self._make_pull)

    def on_rows(self, frame: f.Rows) -> list[Any]:
        if not self._answers(frame):
            return []
        view = self.cache[frame.src] = {**self.cache[frame.src], **frame.rows}
        self.witness.pulled((self.worker, self.epoch), self.step, view, frame)
        return self._advance(frame.src)

    def _prepare(self) -> list[Any]:
        if "sequence_reused" not in self.bugs or not self.was_aborted:
            self.seq += 1
        self.was_aborted = False
        self.tag += 1
        self.parts = {
            shard: part_of(self.worker, self.step, index, self.tag) for index, shard in enumerate(self.shards)
        }
        return self._ask("preparing", self._make_prepare)

    def _make_prepare(self, shard: str, req: int) -> f.Prepare:
        part = self.parts[shard]
        return f.Prepare(self.name, shard, req, self.worker, self.epoch, self.route, self.seq, self.step, part)

    def _make_commit(self, shard: str, req: int, seq: int | None = None, part: f.Part | None = None) -> f.Commit:
        seq = self.seq if seq is None else seq
        step = self.held[seq][0]
        return f.Commit(self.name, shard, req, self.worker, self.epoch, self.route, seq, step, part)

    def _commit(self) -> list[Any]:
        self.held[self.seq] = (self.step, self.parts)
        self.witness.decided((self.worker, self.epoch, self.seq), self.step, self.parts)
        if self.has_quorum and "quorum_of_each_shard" not in self.bugs:
            return self._ask("naming", self._make_commit, self.shards[:1])
        return self._ask("committing", self._make_commit)

    def _named(self) -> list[Any]:
        """The naming shard has this worker among the step's members; the other shards are told."""
        return self._ask("committing", self._make_commit, self.shards[1:]) or self._finish()

    def _abort(self) -> list[Any]:
        return self._ask(
            "aborting", lambda s, r: f.Abort(self.name, s, r, self.worker, self.epoch, self.route, self.seq)
        )

    def _aborted(self) -> list[Any]:
        self.was_aborted = True
        self.witness.aborted((self.worker, self.epoch, self.seq))
        self.held.pop(self.seq, None)
        if self.open_step > self.step:
            self.step = self.open_step
            return self._next()
        return self._pull()

    def _finish(self) -> list[Any]:
        self.witness.finished((self.worker, self.epoch, self.seq), self.step)
        self.step += 1
        return self._next()

    def _answers(self, frame: Any) -> bool:
        request = self.waiting.get(frame.src)
        return request is not None and request.req == frame.req

    def on_ack(self, frame: f.Ack) -> list[Any]:
        return self._advance(frame.src) if self._answers(frame) else []

    def _advance(self, shard: str) -> list[Any]:
        """One shard answered; when all did, the next phase begins."""
        if self.phase == "replaying" and (rest := self.replays[shard]):
            return [self._send_replay(shard, rest.pop(0))]
        del self.waiting[shard]
        early = self.phase == "preparing" and "decide_early" in self.bugs
        if self.waiting and not early:
            return []
        after = {
            "pulling": self._prepare,
            "preparing": self._commit,
            "naming": self._named,
            "committing": self._finish,
            "aborting": self._aborted,
            "replaying": self._resume,
        }
        return after[self.phase]()

    def on_error(self, frame: f.Error) -> list[Any]:
        if not self._answers(frame):
            return []
        if frame.code == f.FENCED:
            if self.phase in ("naming", "committing"):
                self.witness.fenced((self.worker, self.epoch, self.seq), frame.src)
            return self._register()
        if frame.code == f.STALE_ROUTE:
            return self._reroute()
        if frame.code == f.OUTSIDE:
            if "outside_commits" in self.bugs and self.phase in ("naming", "committing"):
                return self._advance(frame.src)
            self.open_step = max(self.open_step, frame.open_step)
            self.witness.outside((self.worker, self.epoch, self.seq), self.step, frame.open_step)
            return self._abort()
        if frame.code == f.EXHAUSTED:
            return self._abort()
        if frame.code == f.DEADLINE:
            self.witness.waited(self.step, frame.waits_for)
            return [self._send(frame.src, self._make_pull)]
        if frame.code == f.NOT_PREPARED:
            self.witness.unprepared((self.worker, self.epoch, self.seq), frame.src)
        return []  # Unavailable: tick sends it again

    # After a shard was restored: learn its last sequence, replay what it lost, take the step up again

    def _reroute(self) -> list[Any]:
        if self.phase not in ("rerouting", "greeting", "replaying"):
            self.resumed, self.unprepared = self.phase, list(self.waiting)
        self.phase, self.waiting = "rerouting", {}
        return self.tick()

    def on_route_is(self, frame: f.RouteIs) -> list[Any]:
        if self.phase != "rerouting" or frame.route <= self.route:
            return []
        self.route = frame.route
        self.replays: dict[str, list[int]] = {}
        return self._ask("greeting", lambda s, r: f.Hello(self.name, s, r, self.worker, self.epoch, self.route))

    def on_hello_ack(self, frame: f.HelloAck) -> list[Any]:
        if not self._answers(frame):
            return []
        self.replays[frame.src] = sorted(seq for seq in self.held if seq > frame.window.committed)
        if "replay_unordered" in self.bugs:
            self.replays[frame.src].reverse()
        del self.waiting[frame.src]
        if self.waiting:
            return []
        if "replay_dropped" in self.bugs:
            self.replays = {}
        first = {shard: rest.pop(0) for shard, rest in self.replays.items() if rest}
        if not first:
            return self._resume()
        self.phase = "replaying"
        return [self._send_replay(shard, seq) for shard, seq in first.items()]

    def _send_replay(self, shard: str, seq: int) -> Any:
        part = self.held[seq][1][shard]
        return self._send(shard, lambda s, r: self._make_commit(s, r, seq, part))

    def _resume(self) -> list[Any]:
        if self.resumed == "pulling":
            return self._pull()
        if self.resumed == "preparing":  # prepared anew everywhere, under the same sequence and content
            missing = self.unprepared if "prepare_acks_kept" in self.bugs else None
            return self._ask("preparing", self._make_prepare, missing) or self._commit()
        if self.resumed == "naming":  # which shard answers for the step's members is not a matter of the route
            return self._ask("naming", self._make_commit, self.shards[:1])
        if self.resumed == "committing":  # the replay brought it to every shard
            return self._finish()
        if self.resumed == "aborting":
            return self._abort()
        return self._next()

    def on_durable(self, frame: f.Durable) -> list[Any]:
        if frame.epoch == self.epoch:
            self.held = {seq: held for seq, held in self.held.items() if seq > frame.seq or seq == self.seq}
        return []


HANDLERS: dict[type, Any] = {
    f.Welcome: Worker.on_welcome,
    f.Refused: Worker.on_refused,
    f.LeaveReply: Worker.on_leave_reply,
    f.RouteIs: Worker.on_route_is,
    f.Durable: Worker.on_durable,
    f.Rows: Worker.on_rows,
    f.Ack: Worker.on_ack,
    f.Error: Worker.on_error,
    f.HelloAck: Worker.on_hello_ack,
}
