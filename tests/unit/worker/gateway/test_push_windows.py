"""The gateway's windows: a push is carried out once, whatever becomes of the calls that bring it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from sparserow.proto.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    InvalidArgument,
    ResourceExhausted,
    SparserowError,
)
from sparserow.worker.gateway import push_windows
from sparserow.worker.gateway.push_windows import FORGET_AFTER_SEC, ClientKey, PushWindows

ME = ClientKey("ads", "me")


class Store:
    """What pushes are applied to, through a gate."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: SparserowError | None = None

    def push(self, what: str) -> Callable[[], Awaitable[None]]:
        async def apply() -> None:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            self.applied.append(what)

        return apply


def in_doubt(error: SparserowError) -> SparserowError:
    error.may_be_applied = True
    return error


def run(scene: Callable[[PushWindows, Store], Awaitable[None]], now: list[float] | None = None) -> None:
    async def main() -> None:
        clock = {} if now is None else {"clock": lambda: now[0]}
        await asyncio.wait_for(scene(PushWindows(**clock), Store()), 60)

    asyncio.run(main())


def test_numbers_go_up_by_one_and_a_repeat_is_answered_again() -> None:
    async def scene(windows: PushWindows, store: Store) -> None:
        assert not await windows.push(ME, 1, store.push("1"))
        assert await windows.push(ME, 1, store.push("1 again"))
        assert not await windows.push(ME, 2, store.push("2"))
        for number in (1, 4):
            with pytest.raises(FailedPrecondition, match="allowed: 2 again, or 3"):
                await windows.push(ME, number, store.push("no"))
        with pytest.raises(InvalidArgument, match="sequence: 0"):
            await windows.push(ME, 0, store.push("no"))
        with pytest.raises(InvalidArgument, match="1 to 200 bytes"):
            await windows.push(ClientKey("ads", "x" * 201), 1, store.push("no"))
        assert store.applied == ["1", "2"]

    run(scene)


def test_a_push_that_its_client_gave_up_goes_on_and_its_repeat_joins_it() -> None:
    async def scene(windows: PushWindows, store: Store) -> None:
        store.gate.clear()
        first = asyncio.create_task(windows.push(ME, 1, store.push("1")))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        repeats = [asyncio.create_task(windows.push(ME, 1, store.push("1 again"))) for _ in range(3)]
        second = asyncio.create_task(windows.push(ME, 2, store.push("2")))
        await asyncio.sleep(0)
        repeats[0].cancel()
        store.gate.set()
        assert await repeats[1]
        assert await repeats[2]
        assert not await second
        assert store.applied == ["1", "2"]

    run(scene)


def test_a_push_whose_end_is_not_known_is_never_pushed_again() -> None:
    async def scene(windows: PushWindows, store: Store) -> None:
        for error in (in_doubt(DeadlineExceeded("late")), in_doubt(Fenced("left"))):
            key = ClientKey("ads", error.code)
            store.error = error
            with pytest.raises(type(error)):
                await windows.push(key, 1, store.push("1"))
            store.error = None
            with pytest.raises(FailedPrecondition, match="not known whether it was applied"):
                await windows.push(key, 1, store.push("1 again"))
            assert not await windows.push(key, 2, store.push("2"))
        assert store.applied == ["2", "2"]

    run(scene)


def test_an_error_that_is_no_refusal_leaves_it_open_whether_the_push_was_applied() -> None:
    async def scene(windows: PushWindows, store: Store) -> None:
        async def broken() -> None:
            raise OSError("a bug")

        with pytest.raises(OSError, match="a bug"):
            await windows.push(ME, 1, broken)
        with pytest.raises(FailedPrecondition, match="not known"):
            await windows.push(ME, 1, store.push("1"))

    run(scene)


def test_a_refused_push_leaves_its_number_free_and_no_window() -> None:
    async def scene(windows: PushWindows, store: Store) -> None:
        store.error = ResourceExhausted("full")
        for client in range(100):
            with pytest.raises(ResourceExhausted):
                await windows.push(ClientKey("ads", f"c{client}"), 1, store.push("no"))
        assert len(windows) == 0
        store.error = None
        assert not await windows.push(ME, 1, store.push("1"))
        store.error = ResourceExhausted("full")
        with pytest.raises(ResourceExhausted):
            await windows.push(ME, 2, store.push("no"))
        store.error = None
        assert await windows.push(ME, 1, store.push("no"))
        assert not await windows.push(ME, 2, store.push("2"))
        assert store.applied == ["1", "2"]

    run(scene)


def test_clients_of_two_namespaces_do_not_meet() -> None:
    async def scene(windows: PushWindows, store: Store) -> None:
        assert not await windows.push(ClientKey("ads", "me"), 1, store.push("ads"))
        assert not await windows.push(ClientKey("news", "me"), 1, store.push("news"))
        assert store.applied == ["ads", "news"]

    run(scene)


def test_a_window_is_forgotten_after_its_time_and_never_while_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_windows, "MOST_CLIENTS", 4)
    now = [0.0]

    async def scene(windows: PushWindows, store: Store) -> None:
        first, doubtful, third = (ClientKey("ads", name) for name in ("first", "doubtful", "third"))
        assert not await windows.push(first, 1, store.push("first"))
        store.error = in_doubt(DeadlineExceeded("late"))
        with pytest.raises(DeadlineExceeded):
            await windows.push(doubtful, 1, store.push("doubtful"))
        store.error = None
        now[0] = FORGET_AFTER_SEC - 1
        with pytest.raises(ResourceExhausted, match="this gateway knows 2 clients of namespace 'ads'"):
            await windows.push(third, 1, store.push("third"))
        now[0] = FORGET_AFTER_SEC
        assert not await windows.push(third, 1, store.push("third"))
        with pytest.raises(ResourceExhausted):  # the doubtful one stays
            await windows.push(first, 1, store.push("no"))
        with pytest.raises(FailedPrecondition, match="not known whether"):
            await windows.push(doubtful, 1, store.push("no"))
        assert store.applied == ["first", "third"]

    run(scene, now)


def test_the_end_waits_for_what_runs() -> None:
    async def scene(windows: PushWindows, store: Store) -> None:
        store.gate.clear()
        push = asyncio.create_task(windows.push(ME, 1, store.push("1")))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, store.gate.set)
        await windows.drain(60)
        assert store.applied == ["1"]
        assert not await push

    run(scene)


def test_a_namespace_leaves_as_many_windows_for_others_as_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_windows, "MOST_CLIENTS", 60)
    now = [0.0]

    async def scene(windows: PushWindows, store: Store) -> None:
        async def fill(namespace: str) -> int:
            before = len(windows)
            with pytest.raises(ResourceExhausted, match=f"of namespace '{namespace}'"):
                await push_all(ClientKey(namespace, f"c{number}") for number in range(1000))
            return len(windows) - before

        async def push_all(keys: Iterable[ClientKey]) -> None:
            for key in keys:
                await windows.push(key, 1, store.push("1"))

        assert [await fill(name) for name in ("ads", "news", "shop")] == [30, 15, 8]
        assert not await windows.push(ClientKey("ads", "c0"), 2, store.push("2"))  # of a client that it knows
        now[0] = FORGET_AFTER_SEC
        await windows.push(ClientKey("new", "first"), 1, store.push("1"))
        assert await fill("new") == 29

    run(scene, now)
