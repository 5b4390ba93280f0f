"""All interleavings of a client and the shards of its host that write into its memory, one message at a time.

What is modelled is who owns memory that a request has named (cpp_ext/rpc/client/channel_lane.h, server/frame_io.h):
the request until its answer is read; after a deadline the connection, until the late answer is read; after the client
has left the connection, that connection until the shard shows its end, which it does after its last use of the memory.
A shard may be at any point of its work in between, and a write that begins may end arbitrarily late.

What must hold: memory is never written by a request that it no longer belongs to, a request that is sent again is never
answered from memory that an older connection may still write, and in the end all memory is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

_BLOCKS, _REQUESTS, _CONNECTIONS = 2, 3, 2
_ORPHAN, _OTHER = "memory without an owner is written", "memory of another request is written"
_OLDER = "an older connection writes what a newer one answers"


@dataclass(frozen=True)
class Work:
    """A request on its way at a shard: the connection it came by, its memory, and whether it writes there now."""

    request: int
    connection: int
    block: int
    is_writing: bool = False
    is_answered: bool = False


@dataclass(frozen=True)
class State:
    """A client's requests, the owners of its memory, and what the shards have of it.

    Attributes:
        next: the number of the next request.
        waits: the request that the caller waits for, with its block; None: it is between two calls.
        connection: the number of the present one.
        late: blocks that the connection owns for requests that were given up, as (request, block).
        ending: blocks that connections own which the client has left, as (connection, block).
        works: what the shards work on.
        ended: connections whose end the shard has shown.
        is_due: whether the request has to be sent, for the first time or again.
        wrong: what has gone wrong.
    """

    next: int = 0
    waits: tuple[int, int] | None = None
    connection: int = 0
    late: frozenset[tuple[int, int]] = frozenset()
    ending: frozenset[tuple[int, int]] = frozenset()
    works: frozenset[Work] = frozenset()
    ended: frozenset[int] = frozenset()
    is_due: bool = False
    wrong: str = ""


@dataclass(frozen=True)
class Rules:
    """What the client and the shard do; each False is a planted fault.

    Attributes:
        keeps_late: memory of a request that was given up keeps an owner until the late answer.
        keeps_ending: memory of a connection that was left keeps an owner until its end is shown.
        moves_or_waits: a request that is sent again waits for that end where its rows may still be written.
        ends_after_use: the shard shows the end of a connection after its last use of the memory.
    """

    keeps_late: bool = True
    keeps_ending: bool = True
    moves_or_waits: bool = True
    ends_after_use: bool = True


def _owned(state: State) -> set[int]:
    blocks = {block for _, block in state.late | state.ending}
    return blocks if state.waits is None else blocks | {state.waits[1]}


def _calls(state: State, rules: Rules) -> Iterator[State]:
    """The caller: begins a call, or gives it up at its deadline."""
    if state.waits is None and state.next < _REQUESTS:
        for block in set(range(_BLOCKS)) - _owned(state):
            yield replace(state, next=state.next + 1, waits=(state.next, block), is_due=True)
    if state.waits is not None:
        request, block = state.waits
        was_sent = any(w.request == request and w.connection == state.connection for w in state.works)
        late = state.late | {(request, block)} if was_sent and rules.keeps_late else state.late
        yield replace(state, waits=None, is_due=False, late=late)


def _channel(state: State, rules: Rules) -> Iterator[State]:
    """The connection: sends, reads answers, breaks, and sees the end of those that it has left."""
    if state.is_due and state.waits is not None:
        request, block = state.waits
        may_be_written = any(block == other for _, other in state.ending)
        if not (may_be_written and rules.moves_or_waits):
            sent = Work(request, state.connection, block)
            yield replace(state, works=state.works | {sent}, is_due=False)
    for work in state.works:
        if work.connection != state.connection or not work.is_answered:
            continue
        rest = state.works - {work}
        if state.waits is not None and state.waits[0] == work.request and not state.is_due:
            yield replace(state, works=rest, waits=None)
        else:
            yield replace(state, works=rest, late=state.late - {(work.request, work.block)})
    if state.connection + 1 < _CONNECTIONS:
        mine = {w.block for w in state.works if w.connection == state.connection}
        kept = {(state.connection, block) for block in mine} if rules.keeps_ending else set()
        again = state.waits is not None
        yield replace(
            state,
            connection=state.connection + 1,
            late=frozenset(),
            ending=state.ending | kept,
            is_due=again,
        )
    for connection in state.ended:
        rest = frozenset(each for each in state.ending if each[0] != connection)
        if rest != state.ending:
            yield replace(state, ending=rest)


def _shards(state: State, rules: Rules) -> Iterator[State]:
    """The shards: begin to write, end a write with an answer, and show the end of a connection that the client left."""
    for work in state.works:
        rest = state.works - {work}
        if not work.is_writing and not work.is_answered and work.connection not in state.ended:
            yield replace(state, works=rest | {replace(work, is_writing=True)})
        if work.is_writing:
            wrong = state.wrong or _misuse(state, work)
            answered = replace(work, is_writing=False, is_answered=True)
            # Because the client has left that connection, nothing reads the shard's answer on it.
            left = rest if work.connection < state.connection else rest | {answered}
            yield replace(state, works=left, wrong=wrong)
    for connection in range(state.connection):
        its = {work for work in state.works if work.connection == connection}
        if connection in state.ended or (rules.ends_after_use and any(work.is_writing for work in its)):
            continue
        silent = {work for work in its if not work.is_writing}  # what was not begun is not begun any more
        yield replace(state, ended=state.ended | {connection}, works=state.works - silent)


def _misuse(state: State, work: Work) -> str:
    """Returns what is wrong with a write that happens now; "" for nothing."""
    block = work.block
    owner = state.waits[0] if state.waits is not None and state.waits[1] == block else None
    if owner is None:
        is_owned = (work.request, block) in state.late or any(other == block for _, other in state.ending)
        return "" if is_owned else _ORPHAN
    if owner != work.request:
        return _OTHER
    if work.connection < state.connection and not state.is_due:
        return _OLDER
    return ""


def outcome(rules: Rules) -> tuple[set[str], int]:
    """Returns all that may go wrong, and the number of states."""
    first = State()
    seen, queue, wrong = {first}, deque([first]), set()
    while queue:
        state = queue.popleft()
        if state.wrong:
            wrong.add(state.wrong)
            continue
        steps: list[Callable[[State, Rules], Iterator[State]]] = [_calls, _channel, _shards]
        nexts = {after for step in steps for after in step(state, rules)}
        if not nexts and _owned(state):
            wrong.add("memory is never free again")
        for each in nexts - seen:
            seen.add(each)
            queue.append(each)
    return wrong, len(seen)


def test_memory_is_written_by_whom_it_belongs_to_and_is_free_in_the_end() -> None:
    wrong, states = outcome(Rules())
    assert wrong == set()
    assert states > 1000


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        (Rules(keeps_late=False), {_ORPHAN, _OTHER}),
        (Rules(keeps_ending=False), {_ORPHAN, _OTHER, _OLDER}),
        (Rules(moves_or_waits=False), {_OLDER}),
        (Rules(ends_after_use=False), {_ORPHAN, _OTHER, _OLDER}),
    ],
)
def test_planted_faults_are_found(planted: Rules, wrong: set[str]) -> None:
    assert outcome(planted)[0] == wrong
