"""What the processes of the model say to each other: data frames, control calls and the follower's stream.

``src`` and ``dst`` are node names: ``w0`` a worker, ``s0`` a shard, ``c`` the coordinator, ``f`` the follower.
Fields named ``ghost_*`` exist only for the checker; no state machine reads them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Version = tuple[int, int]  # (lineage, sequence of the slot)
Row = tuple[Version, Any]  # value: the tuple of updates since the row's birth; None = tombstone
Pair = tuple[int, int]  # (worker id, worker epoch)
CommitId = tuple[int, int, int]  # (worker id, worker epoch, sequence)

ABSENT: Row = ((0, 0), ())

UNAVAILABLE = "Unavailable"
STALE_ROUTE = "StaleRoute"
FENCED = "Fenced"
EXHAUSTED = "ResourceExhausted"
DEADLINE = "DeadlineExceeded"
NOT_PREPARED = "FailedPrecondition: not prepared"
REFUSED = "Refused"
OUTSIDE = "OutsideQuorum"


class Part(NamedTuple):
    """What one commit brings to one shard; ``tag`` tells apart the tries of one step."""

    tag: int
    keys: tuple[int, ...]
    deleted: tuple[int, ...]


class Span(NamedTuple):
    """The steps in which a worker counts; ``until`` is None while it lives."""

    first: int
    until: int | None


class WindowState(NamedTuple):
    floor: int = 0  # every sequence up to here is finished: committed or aborted
    committed: int = 0  # the last sequence that was committed
    step: int = -1  # its step
    count: int = 0  # commits so far


class Pull(NamedTuple):
    src: str
    dst: str
    req: int
    worker: int
    epoch: int
    route: int
    step: int
    have: dict[int, Version]  # conditional: rows that the worker holds


class Rows(NamedTuple):
    src: str
    dst: str
    req: int
    rows: dict[int, Row]
    ghost_truth: dict[int, Row]
    ghost_seen: tuple[Any, ...]
    ghost_members: dict[Pair, Span]


class Prepare(NamedTuple):
    src: str
    dst: str
    req: int
    worker: int
    epoch: int
    route: int
    seq: int
    step: int
    part: Part


class Commit(NamedTuple):
    src: str
    dst: str
    req: int
    worker: int
    epoch: int
    route: int
    seq: int
    step: int
    part: Part | None  # None: what PREPARE brought


class Abort(NamedTuple):
    src: str
    dst: str
    req: int
    worker: int
    epoch: int
    route: int
    seq: int


class Hello(NamedTuple):
    src: str
    dst: str
    req: int
    worker: int
    epoch: int
    route: int


class HelloAck(NamedTuple):
    src: str
    dst: str
    req: int
    window: WindowState


class Ack(NamedTuple):
    src: str
    dst: str
    req: int


class Error(NamedTuple):
    src: str
    dst: str
    req: int
    code: str
    waits_for: tuple[int, ...] = ()
    open_step: int = -1  # of OUTSIDE: the lowest step that still takes members here


class Register(NamedTuple):
    src: str
    dst: str
    nonce: int  # of the try to register: a later one belongs to a later process or a later need
    epoch: int  # the process's last epoch, 0 = none


class Welcome(NamedTuple):
    src: str
    dst: str
    nonce: int
    epoch: int
    step: int
    route: int


class Refused(NamedTuple):
    src: str
    dst: str
    nonce: int


class Leave(NamedTuple):
    src: str
    dst: str
    epoch: int
    route: int


class LeaveReply(NamedTuple):
    src: str
    dst: str
    epoch: int
    code: str  # "" = left


class GetRoute(NamedTuple):
    src: str
    dst: str


class RouteIs(NamedTuple):
    src: str
    dst: str
    route: int


class Durable(NamedTuple):
    src: str
    dst: str
    epoch: int
    seq: int


class ShardUp(NamedTuple):
    src: str
    dst: str
    incarnation: int


class Hold(NamedTuple):
    src: str
    dst: str
    generation: int
    fence: tuple[Pair, ...]


class Report(NamedTuple):
    src: str
    dst: str
    generation: int
    incarnation: int
    empty: bool  # restarted and not let in again
    windows: dict[Pair, WindowState]
    prepared: dict[Pair, int]


class Resolve(NamedTuple):
    src: str
    dst: str
    generation: int
    incarnation: int  # of the shard that reported
    route: int
    members: dict[Pair, Span]
    epochs: dict[int, int]
    finals: dict[Pair, WindowState]  # of workers that left: their last committed sequence
    target: dict[Pair, int] | None  # the cut: worker -> step
    restore: int | None  # cut to load
    lineage: int


class Resolved(NamedTuple):
    src: str
    dst: str
    generation: int
    windows: dict[Pair, WindowState]


class Sync(NamedTuple):
    src: str
    dst: str
    cursor: Version


class Delta(NamedTuple):
    src: str
    dst: str
    begin: Version
    end: Version
    rows: dict[int, Row]


class Snapshot(NamedTuple):
    src: str
    dst: str
    end: Version
    rows: dict[int, Row]
