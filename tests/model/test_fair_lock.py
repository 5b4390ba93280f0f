"""All interleavings of a few threads at the phase-fair lock of cpp_ext/util/fair_mutex.h, one atomic access at a time.

A state is (readers_in's count, its two bits of a writer, readers_out, writers_in, writers_out) and where each thread
is. Whoever cannot go on in any interleaving would sleep for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

_PRESENT, _PHASE = 2, 1


class Words(NamedTuple):
    came: int = 0  # readers_in without its two bits
    writer: int = 0  # the two bits
    left: int = 0
    tickets: int = 0
    served: int = 0

    @property
    def of_readers(self) -> tuple[int, int]:
        """The word ``readers_in``."""
        return self.came, self.writer


class Thread(NamedTuple):
    """Where a thread is: the next access, 0 to begin with, and what it keeps from those before."""

    at: int = 0
    kept: tuple[int, ...] = ()


_END = Thread(99)
Steps = Iterator[tuple[Thread, Words]]
Kind = Callable[[Thread, Words], Steps]


def reader(thread: Thread, words: Words) -> Steps:
    match thread:
        case Thread(0):
            after = words._replace(came=words.came + 1)
            yield (Thread(1, (words.writer,)) if words.writer else Thread(2)), after
        case Thread(1, (writer,)):
            if words.writer != writer:
                yield Thread(2), words
        case Thread(2):
            yield _END, words._replace(left=words.left + 1)


def _entered(words: Words, ticket: int) -> Words:
    return words._replace(writer=_PRESENT | (ticket & _PHASE))


def writer(thread: Thread, words: Words) -> Steps:
    match thread:
        case Thread(0):
            yield Thread(1, (words.tickets,)), words._replace(tickets=words.tickets + 1)
        case Thread(1, (ticket,)):
            if words.served == ticket:
                yield Thread(2, (ticket,)), words
        case Thread(2, (ticket,)):
            yield Thread(3, (words.came,)), _entered(words, ticket)
        case Thread(3, (before,)):
            if words.left == before:
                yield Thread(4), words
        case Thread(4):
            yield Thread(5), words._replace(writer=0)
        case Thread(5):
            yield _END, words._replace(served=words.served + 1)


def _tries(thread: Thread, words: Words, *, looks_at_left_first: bool) -> Steps:
    match thread:
        case Thread(0):
            yield Thread(1, (words.served,)), words
        case Thread(1, (ticket,)):
            yield Thread(2, (ticket, *((words.left, 0) if looks_at_left_first else words.of_readers))), words
        case Thread(2, (ticket, *looked)):
            other = words.of_readers if looks_at_left_first else (words.left, 0)
            yield (Thread(3, (ticket,)) if tuple(looked) == other else _END), words
        case Thread(3, (ticket,)):
            is_next = words.tickets == ticket
            yield (Thread(4, (ticket,)), words._replace(tickets=ticket + 1)) if is_next else (_END, words)
        case Thread(4, (ticket,)):
            yield Thread(5, (words.came,)), _entered(words, ticket)
        case Thread(5, (before,)):
            yield Thread(6, (words.left == before,)), words  # True: it has the lock
        case Thread(6):
            yield Thread(7), words._replace(writer=0)
        case Thread(7):
            yield _END, words._replace(served=words.served + 1)


def try_lock(thread: Thread, words: Words) -> Steps:
    return _tries(thread, words, looks_at_left_first=True)


def try_lock_that_looks_at_who_came_first(thread: Thread, words: Words) -> Steps:
    return _tries(thread, words, looks_at_left_first=False)


def _has_it(kind: Kind, thread: Thread) -> bool:
    if kind is reader:
        return thread.at == 2
    if kind in (try_lock, try_lock_that_looks_at_who_came_first):
        return thread.at == 6 and thread.kept == (True,)
    return thread.at == 4


def outcome(*kinds: Kind) -> tuple[str, int]:
    """Returns what is wrong, "" for nothing, and the number of states."""
    first = (Words(), *[Thread()] * len(kinds))
    seen, queue = {first}, deque([first])
    while queue:
        words, *threads = queue.popleft()
        having = [kind for kind, thread in zip(kinds, threads, strict=True) if _has_it(kind, thread)]
        if len(having) > 1 and any(kind is not reader for kind in having):
            return "a writer is not alone", len(seen)
        nexts = [
            (after, *threads[:i], thread, *threads[i + 1 :])
            for i, kind in enumerate(kinds)
            for thread, after in kind(threads[i], words)
        ]
        if not nexts and any(thread != _END for thread in threads):
            return "nobody can go on", len(seen)
        for each in nexts:
            if each not in seen:
                seen.add(each)
                queue.append(each)
    return "", len(seen)


def test_everybody_goes_on_and_a_writer_is_alone() -> None:
    for kinds in (
        [reader, reader, try_lock, writer, writer],
        [reader, reader, reader, writer, writer],
        [reader, reader, try_lock, try_lock, writer],
    ):
        wrong, states = outcome(*kinds)
        assert wrong == ""
        assert states > 1000


def no_wait_for_readers(thread: Thread, words: Words) -> Steps:
    """A writer that does not wait for the readers that came before it."""
    for after, then in writer(thread, words):
        yield (Thread(4) if after.at == 3 else after), then


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        (try_lock_that_looks_at_who_came_first, "nobody can go on"),
        (no_wait_for_readers, "a writer is not alone"),
    ],
)
def test_planted_faults_are_found(planted: Kind, wrong: str) -> None:
    assert outcome(reader, reader, planted, writer, writer)[0] == wrong
