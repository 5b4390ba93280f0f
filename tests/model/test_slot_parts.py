"""All short histories of one slot that a follower gets in parts of one row or tombstone (cpp_ext/store/changes).

A history is writes and erasures of three rows between reads, each of which is applied and acknowledged, applied with
the acknowledgement lost, or lost itself; a round may begin anew at any time. After each history one undisturbed round
must give the follower what the source has, and no part may take a row from it that both have. Two tombstones are
remembered; what is forgotten makes a snapshot necessary.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest

KEYS = (0, 1, 2)
_FIRST = (0, 0)  # place: tombstones up to this sequence were sent, rows up to this key
_LONGEST = 6  # steps of a history
_MOST_WRITES = 5
_TOMBSTONES = 2

Rows = tuple[int, int, int]  # the version of each row; 0: there is none


class Parts(NamedTuple):
    """How far the parts of the slot were acknowledged, and where the next one begins when the last sent one is."""

    is_whole: bool
    until: int
    begin: tuple[int, int]
    next: tuple[int, int]


class State(NamedTuple):
    rows: Rows = (1, 2, 3)
    sequence: int = 3
    tombstones: tuple[tuple[int, int], ...] = ()  # (sequence, key), the last ones
    floor: int = 0  # of tombstones: those up to it may be missing
    mirror: Rows = (0, 0, 0)  # the follower's
    since: int = 0  # what the cursor acknowledged; 0: nothing
    parts: Parts | None = None
    is_robbed: bool = False  # a row went from the mirror that the source has


class Faults(NamedTuple):
    """Ways to get it wrong, each of which a history shows."""

    until_is_the_last_part: bool = False
    moves_when_sent: bool = False
    replaces_to_the_end: bool = False
    replaces_nothing: bool = False
    forgets_tombstones: bool = False
    goes_on_in_another_round: bool = False


def _with(rows: Rows, key: int, version: int) -> Rows:
    return tuple(version if each == key else rows[each] for each in KEYS)  # type: ignore[return-value]


def write(state: State, key: int) -> State:
    return state._replace(rows=_with(state.rows, key, state.sequence + 1), sequence=state.sequence + 1)


def erase(state: State, key: int) -> State:
    at = state.sequence + 1
    kept = (*state.tombstones, (at, key))
    floor = kept[-_TOMBSTONES - 1][0] if len(kept) > _TOMBSTONES else state.floor
    return state._replace(rows=_with(state.rows, key, 0), sequence=at, tombstones=kept[-_TOMBSTONES:], floor=floor)


def read(state: State, faults: Faults, *, begins: bool, arrives: bool, is_acknowledged: bool) -> tuple[State, bool]:
    """One page of at most one tombstone or row; also returns whether the round ended with it."""
    parts = None if begins and not faults.goes_on_in_another_round else state.parts
    if parts is None and state.since == state.sequence:
        return state._replace(parts=None), True
    if parts is not None:
        after = max(state.since, parts.begin[0])
        is_lost = after < state.floor and after < parts.until and not faults.forgets_tombstones
        if parts.begin == _FIRST or (is_lost and not parts.is_whole):
            parts = None
    if parts is None:
        is_whole = state.since == 0 or state.since < state.floor
        parts = Parts(is_whole, state.sequence, _FIRST, _FIRST)
    since = 0 if parts.is_whole else state.since

    begin, end = parts.begin, None
    erased = [
        (at, key) for at, key in state.tombstones if not parts.is_whole and max(since, begin[0]) < at <= parts.until
    ]
    newer = [key for key in KEYS if key >= begin[1] and state.rows[key] > since]
    written = [] if erased else newer[:1]
    if len(erased) > 1 or (erased and newer):
        end = (erased[0][0], begin[1])
        erased = erased[:1]
    elif len(newer) > 1:
        end = (parts.until, newer[1])
    if faults.until_is_the_last_part and end is None:
        parts = parts._replace(until=state.sequence)

    mirror, is_robbed = state.mirror, state.is_robbed
    if arrives:
        for at, key in erased:
            mirror = _with(mirror, key, 0) if mirror[key] < at else mirror
        for key in written:
            mirror = _with(mirror, key, max(mirror[key], state.rows[key]))
        if parts.is_whole and not faults.replaces_nothing:
            last = KEYS[-1] if end is None or faults.replaces_to_the_end else end[1] - 1
            for key in range(begin[1], last + 1):
                is_robbed |= key not in written and min(mirror[key], state.rows[key]) > 0
                mirror = mirror if key in written else _with(mirror, key, 0)

    after = state._replace(mirror=mirror, is_robbed=is_robbed)
    if end is not None:
        moves = is_acknowledged or faults.moves_when_sent
        return after._replace(parts=parts._replace(begin=end if moves else begin, next=end)), False
    if is_acknowledged:
        return after._replace(since=parts.until, parts=None), True
    return after._replace(parts=None if begin == _FIRST else parts), True


def one_round(state: State, faults: Faults, *, begins: bool = True) -> State:
    """An undisturbed round, or the rest of one."""
    for _ in range(20):
        state, ended = read(state, faults, begins=begins, arrives=True, is_acknowledged=True)
        begins = False
        if ended:
            return state
    raise AssertionError(f"a round does not end: {state}")


def first_wrong(faults: Faults) -> tuple[str, int]:
    """Returns what is wrong after some history, "" for nothing, and the number of states."""
    follows = State(mirror=State().rows, since=State().sequence)
    seen, queue = {State(), follows}, deque([(State(), 0, 0), (follows, 0, 0)])
    while queue:
        state, steps, writes = queue.popleft()
        ends = [one_round(state, faults)]
        if state.parts is not None:
            ends.append(one_round(one_round(state, faults, begins=False), faults))
        for end in ends:
            if end.mirror != end.rows or end.is_robbed:
                return f"{state} becomes {end}", len(seen)
        if steps == _LONGEST:
            continue
        nexts = [
            (read(state, faults, begins=begins, arrives=arrives, is_acknowledged=acknowledged)[0], writes)
            for begins in (True, False)
            for arrives, acknowledged in ((True, True), (True, False), (False, False))
        ]
        if writes < _MOST_WRITES:
            nexts += [(write(state, key), writes + 1) for key in KEYS]
            nexts += [(erase(state, key), writes + 1) for key in KEYS if state.rows[key]]
        for each, made in nexts:
            if each not in seen:
                seen.add(each)
                queue.append((each, steps + 1, made))
    return "", len(seen)


def test_a_round_gives_what_the_source_has_after_every_history() -> None:
    wrong, states = first_wrong(Faults())
    print(f"{states} states")
    assert wrong == ""
    assert states > 5_000


@pytest.mark.parametrize("fault", list(Faults._fields))
def test_each_fault_is_found(fault: str) -> None:
    wrong, states = first_wrong(Faults(**{fault: True}))
    print(f"{states} states: {wrong}")
    assert wrong != ""
