"""``session.prefetch``: order, bounds, errors, early ends, and rows that are what a pull at their step would give."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.worker.prefetch import Prefetch
from sparserow.worker.prefetch.pipeline import Pipeline

ROWS, DIM, TABLES, STEPS = 60, 3, 3, 12
REMAP = torch.randperm(60, generator=torch.Generator().manual_seed(1))
DEADLINE_SEC = 120.0


class Columns(nn.Module):
    """``ids_of`` says which ids of (n, TABLES) each table gets."""

    def __init__(self, ids_of: Callable[[Tensor, int], Tensor] = lambda x, i: x[:, i]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(TABLES))
        self.ids_of = ids_of

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([table(self.ids_of(x, i)).sum(0) for i, table in enumerate(self.tables)])


@dataclass
class Sample:
    ids: Tensor
    scale: float


def matrix(seed: int, rows: int = 7) -> Tensor:
    return torch.randint(0, ROWS, (rows, TABLES), generator=torch.Generator().manual_seed(seed))


SHAPES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Tensor]]] = {
    "tensor": (matrix, lambda batch: batch),
    "int32": (lambda seed: matrix(seed).to(torch.int32), lambda batch: batch),
    "nested": (lambda seed: {"x": [matrix(seed)], "y": torch.rand(2)}, lambda batch: batch["x"][0]),
    "dataclass": (lambda seed: Sample(matrix(seed), 1.0), lambda batch: batch.ids),
}


def connect(staleness: int | None = 0) -> sr.Session:
    return sr.InProcessCluster(shards=2).connect("ahead", staleness=staleness)


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with connect() as session:
        yield session


def distributed(session: sr.Session, model: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(1)
    return session.distribute(model or Columns(), optimizer=sr.optim.Adagrad(lr=0.3), min_rows=1)


def rows_of(session: sr.Session) -> list[np.ndarray[Any, Any]]:
    return [session.table(f"tables.{i}").pull(np.arange(ROWS)) for i in range(TABLES)]


def train(
    session: sr.Session,
    model: nn.Module,
    batches: Any,
    look: Callable[[Any], Tensor],
    micro: int = 1,
    before_step: Callable[[int], None] = lambda _: None,
) -> None:
    for number, batch in enumerate(batches):
        (model(look(batch)) ** 2).sum().backward()
        before_step(number)
        if (number + 1) % micro == 0:
            session.step()


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("sparserow-load", "sparserow-dedup", "sparserow-pull")]


def wait_for_no_threads() -> None:
    until = time.monotonic() + DEADLINE_SEC
    while threads():
        assert time.monotonic() < until, threads()
        time.sleep(0.01)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("micro", [1, 3])
def test_exact_rows_are_bit_equal_to_those_without(shape: str, micro: int) -> None:
    make, look = SHAPES[shape]
    with connect() as plain:
        train(plain, distributed(plain), [make(seed) for seed in range(STEPS)], look, micro)
        expected = rows_of(plain)
    last = max(1, micro - 1)  # a batch that ends a step, and is not the first one, whose rows the op pulls
    up_to_it = sum(len(column.unique()) for seed in range(1, last + 1) for column in look(make(seed)).T)

    def wait_for_later_rows(number: int) -> None:
        """Rows of the batch after it are pulled while its step is open, so that those of both are deferred."""
        until = time.monotonic() + DEADLINE_SEC
        while number == last and session.stats().rows_prefetched <= up_to_it:
            assert time.monotonic() < until, session.stats()
            time.sleep(0.001)

    with connect() as session:
        model = distributed(session)
        batches = session.prefetch((make(seed) for seed in range(STEPS)), depth=3)
        train(session, model, batches, look, micro, wait_for_later_rows)
        stats = session.stats()
        for rows, wanted in zip(rows_of(session), expected, strict=True):
            np.testing.assert_array_equal(rows, wanted)
    assert stats.lookups_missed == 0
    assert min(stats.rows_prefetched, stats.rows_deferred) > 0
    assert stats.bytes_refreshed == 4 * DIM * stats.rows_refreshed
    if micro == 1:  # else the first batch, whose rows the op pulled, ends its step when others were pulled already
        assert stats.rows_revalidated == stats.rows_refreshed == 0  # nobody else writes
    wait_for_no_threads()


def test_the_ids_of_each_forward_of_a_batch_are_learnt(session: sr.Session, caplog: pytest.LogCaptureFixture) -> None:
    """The second one has a plan already, whose own lookups are none of the layers."""
    model = distributed(session, Columns(lambda x, i: (x[:, i] * 7) % ROWS))
    batches = [(matrix(2 * seed), matrix(2 * seed + 1)) for seed in range(STEPS)]
    merged = []
    for parts in session.prefetch(batches, depth=2, always=True):
        for part in parts:
            (model(part) ** 2).sum().backward()
        session.step()
        merged.append(session.stats().pulls_merged)
    assert not caplog.messages, "each id is found in the batch"
    assert session.stats().lookups_missed == 0
    assert merged == merged[:1] * STEPS, "no forward pulls, those aside that are learnt from"


def test_rows_that_others_change_after_they_were_pulled_are_pulled_again(session: sr.Session) -> None:
    model = distributed(session)
    batches = [torch.full((2, TABLES), number) for number in range(4)]  # one key a table, and no two batches share one
    for number, batch in enumerate(session.prefetch(batches, depth=2)):
        if number > 0:
            assert (model.tables[0](batch[:, 0]) == number - 1).all()
        (model(batch) ** 2).sum().backward()
        until = time.monotonic() + DEADLINE_SEC
        while session.stats().rows_prefetched < (0, 2, 3, 3)[number] * TABLES:  # the next batch has its rows
            assert time.monotonic() < until, session.stats()
            time.sleep(0.001)
        session.table("tables.0").assign(np.arange(4), np.full((4, DIM), number, np.float32))
        session.step()
    stats = session.stats()
    assert 2 * TABLES <= stats.rows_revalidated <= 3 * TABLES
    assert 2 <= stats.rows_refreshed <= stats.rows_revalidated
    assert stats.rows_deferred == 0


def test_only_the_first_forward_pulls_for_itself(session: sr.Session) -> None:
    model = distributed(session)
    for _ in range(2):  # what was learnt is kept for the next pass
        before = session.stats()
        train(session, model, session.prefetch([matrix(s) for s in range(5)]), lambda batch: batch)
        assert session.stats().lookups_missed == 0
        assert session.stats().rows_prefetched > before.rows_prefetched
    passes = session.prefetch([matrix(s) for s in range(5)])
    assert len(passes) == 5
    train(session, model, passes, lambda batch: batch)
    before = session.stats()
    train(session, model, passes, lambda batch: batch)
    after = session.stats()
    fetched = after.rows_prefetched + after.rows_deferred - before.rows_prefetched - before.rows_deferred
    assert after.rows_pulled - before.rows_pulled == fetched


def test_ids_named_by_the_author_reach_computed_lookups(session: sr.Session) -> None:
    model = distributed(session, Columns(lambda x, i: REMAP[x[:, i]]))
    batches = session.prefetch(
        [matrix(seed) for seed in range(STEPS)],
        ids=lambda x: {f"tables.{i}": REMAP[x[:, i]] for i in range(TABLES)},
    )
    train(session, model, batches, lambda batch: batch)
    stats = session.stats()
    assert stats.lookups_missed == 0
    assert stats.rows_pulled == stats.rows_prefetched + stats.rows_deferred > 0


def test_computed_ids_are_said_to_be_missing(session: sr.Session, caplog: pytest.LogCaptureFixture) -> None:
    model = distributed(session, Columns(lambda x, i: REMAP[x[:, i]]))
    train(session, model, session.prefetch([matrix(seed) for seed in range(4)]), lambda batch: batch)
    assert "use ids that are no views, casts or arithmetic of a tensor of the batch" in caplog.text
    assert session.stats().rows_prefetched == 0


def test_a_dense_tower_on_servers_is_pulled_ahead_of_its_step(caplog: pytest.LogCaptureFixture) -> None:
    with connect(staleness=2) as session:
        model = distributed(session, nn.Sequential(Columns(), nn.Linear(DIM, 1)))
        session.dense_on_servers(model, optimizer=sr.optim.Adagrad(lr=0.1))
        train(session, model, session.prefetch([matrix(seed) for seed in range(STEPS)]), lambda batch: batch)
        stats = session.stats()
    assert "prefetch" not in caplog.text, "the ids of the tower's rows are the same for every batch"
    assert stats.lookups_missed == 0
    assert stats.rows_prefetched + stats.rows_deferred > 0


def test_arithmetic_of_ids_is_pulled_ahead(session: sr.Session) -> None:
    model = distributed(session, Columns(lambda x, i: (x[:, i] * 7 + 3) % ROWS))
    batches = session.prefetch([matrix(seed) for seed in range(STEPS)])
    train(session, model, batches, lambda batch: batch)
    stats = session.stats()
    assert stats.lookups_missed == 0
    assert stats.rows_prefetched > 0


def test_a_wrong_guess_is_counted_pulled_and_learnt_anew() -> None:
    order = list(range(TABLES))
    results = []
    for ahead in (False, True):
        with connect() as session:
            order[:] = range(TABLES)
            torch.manual_seed(1)  # of the layers' own weights, which are carried over
            model = distributed(session, Columns(lambda x, i: x[:, order[i]]))
            batches: Any = [matrix(seed) for seed in range(16)]
            missed = []
            for number, batch in enumerate(session.prefetch(batches) if ahead else batches):
                if number == 5:
                    order.reverse()
                (model(batch) ** 2).sum().backward()
                session.step()
                missed.append(session.stats().lookups_missed)
            results.append(rows_of(session))
    assert missed[4] == 0 < missed[5]
    assert missed[12] == missed[15]
    for rows, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(rows, wanted)


def test_ids_of_an_unknown_table_or_dtype_are_named(session: sr.Session) -> None:
    distributed(session)
    with pytest.raises(
        sr.errors.InvalidArgument,
        match=r"prefetch\.ids: 'nope' is not allowed; allowed: tables\.0, tables\.1, tables\.2",
    ):
        next(iter(session.prefetch([matrix(0)], ids=lambda x: {"nope": x})))
    with pytest.raises(sr.errors.InvalidArgument, match="float32"):
        next(iter(session.prefetch([matrix(0)], ids=lambda x: {"tables.0": x.float()})))


@pytest.mark.parametrize(
    ("staleness", "options", "message"),
    [
        (0, {"hints": -1}, r"prefetch\.hints: -1 is not allowed; allowed: >= 0"),
        (None, {"depth": 0}, r"prefetch\.depth: 0 is not allowed; allowed: >= 1"),
    ],
)
def test_options_out_of_their_range_are_refused(staleness: int | None, options: dict[str, Any], message: str) -> None:
    with connect(staleness) as session, pytest.raises(sr.errors.InvalidArgument, match=message):
        session.prefetch([], **options)


def test_there_must_be_a_table(session: sr.Session) -> None:
    with pytest.raises(sr.errors.FailedPrecondition, match="distribute"):
        session.prefetch([])


@pytest.mark.parametrize("staleness", [2, None])
def test_beside_a_cache_rows_are_trained_on_without_being_asked_for_again(staleness: int | None) -> None:
    cache = sr.RowCache(1 << 20, staleness=0)
    with sr.InProcessCluster(shards=2).connect("ahead", staleness=staleness, cache=cache) as session:
        model = distributed(session)
        train(session, model, session.prefetch([matrix(s) for s in range(STEPS)]), lambda batch: batch)
        session.flush()
        stats = session.stats()
        assert (stats.steps_committed, stats.lookups_missed, stats.rows_revalidated) == (STEPS, 0, 0)
        assert stats.rows_prefetched > 0


class Faulty:
    """Yields ``good`` batches and raises."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __iter__(self) -> Iterator[Tensor]:
        for seed in range(self.good):
            yield matrix(seed)
        self.fail_here()

    def fail_here(self) -> None:
        raise ZeroDivisionError("of the loader")


@pytest.mark.parametrize("good", [0, 1, 4])
def test_the_loaders_error_reaches_the_training_thread_with_its_traceback(session: sr.Session, good: int) -> None:
    model = distributed(session)
    with pytest.raises(ZeroDivisionError, match="of the loader") as caught:
        train(session, model, session.prefetch(Faulty(good)), lambda batch: batch)
    assert "fail_here" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert session.stats().steps_committed == good
    wait_for_no_threads()


def test_an_error_of_a_background_pull_reaches_the_training_thread(session: sr.Session) -> None:
    model = distributed(session)
    batches = iter(session.prefetch([matrix(seed) for seed in range(6)]))
    (model(next(batches)) ** 2).sum().backward()
    session.step()
    session.core.native.close()
    with pytest.raises(sr.errors.FailedPrecondition, match="closed"):
        list(batches)
    wait_for_no_threads()


class Counted:
    """An endless loader that counts what it gave."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.given += 1
            yield matrix(self.given)


def leave_by_break(batches: Prefetch[Tensor]) -> None:
    for number, _ in enumerate(batches):
        if number == 3:
            break


def leave_by_error(batches: Prefetch[Tensor]) -> None:
    def body() -> None:
        for _ in batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()


def leave_by_forgetting(batches: Prefetch[Tensor]) -> None:
    next(iter(batches))


def leave_by_closing(batches: Prefetch[Tensor]) -> None:
    kept = iter(batches)
    next(kept)
    kept.close()
    with pytest.raises(StopIteration):
        next(kept)


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_forgetting, leave_by_closing])
def test_leaving_early_ends_the_threads(session: sr.Session, leave: Callable[[Prefetch[Tensor]], None]) -> None:
    distributed(session)
    loader = Counted()
    leave(session.prefetch(loader, depth=2))
    gc.collect()
    wait_for_no_threads()
    assert loader.given <= 4 + 2 + 1  # what was taken, the depth, and one in the loader's hand


def test_closing_the_session_ends_the_threads() -> None:
    session = connect()
    distributed(session)
    batches = iter(session.prefetch(Counted()))
    next(batches)
    session.close()
    wait_for_no_threads()


def test_never_more_than_depth_batches_are_ahead() -> None:
    taken, made, ahead = 0, 0, []

    def source() -> Iterator[int]:
        nonlocal made
        for made in range(1, 41):
            ahead.append(made - taken)
            yield made

    pipeline = Pipeline(source(), [("double", lambda item: 2 * item)], depth=3)
    results = []
    while True:
        try:
            results.append(pipeline.take())
        except StopIteration:
            break
        taken += 1
    assert results == [2 * item for item in range(1, 41)]
    assert max(ahead) <= 3 + 1  # one more may be asked for between a take and its count


def test_a_stages_error_ends_the_pipeline() -> None:
    def work(item: int) -> int:
        return 6 // (3 - item)

    pipeline = Pipeline(iter(range(100)), [("divide", work), ("pass", lambda item: item)], depth=2)
    assert [pipeline.take() for _ in range(3)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError) as caught:
        pipeline.take()
    assert "work" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(StopIteration):
        pipeline.take()


def test_a_loader_that_hangs_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        release.wait(DEADLINE_SEC)
        yield 2

    pipeline = Pipeline(source(), [], depth=2)
    assert pipeline.take() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparserow.worker.prefetch.pipeline._CLOSE_SEC", 0.1)
        pipeline.close()
    assert "sparserow-load" in caplog.text
    release.set()
    wait_for_no_threads()


def test_batches_go_to_the_device_and_keep_their_kind(session: sr.Session) -> None:
    model = distributed(session)
    batches = list(session.prefetch([Sample(matrix(seed), 0.5) for seed in range(3)], device="cpu"))
    assert [batch.scale for batch in batches] == [0.5] * 3
    assert all(torch.equal(batch.ids, matrix(seed)) for seed, batch in enumerate(batches))
    model(batches[0].ids)


def batches_of(loader: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in loader]


class Numbered:
    """A loader of torchdata's kind, without torchdata."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < 8:
            self.next += 1
            yield torch.full((2, TABLES), self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


def stateful_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader([torch.full((TABLES,), at) for at in range(16)], batch_size=2)


@pytest.mark.parametrize("make", [Numbered, stateful_loader])
@pytest.mark.parametrize("depth", [1, 4])
def test_its_state_is_what_was_consumed_not_what_was_loaded(
    session: sr.Session, make: Callable[[], Any], depth: int
) -> None:
    model = distributed(session)
    whole = batches_of(make())
    assert len(whole) == 8
    for taken in (0, 3, 7):
        ahead = session.prefetch(make(), depth=depth)
        batches = iter(ahead)
        for _ in range(taken):
            model(next(batches)).sum().backward()
            session.step()
        state = ahead.state_dict()
        with pytest.raises(sr.errors.FailedPrecondition, match="a pass is under way"):
            ahead.load_state_dict(state)
        batches.close()
        assert ahead.state_dict() == state  # a pass that was left early stays where it was
        resumed = session.prefetch(make(), depth=depth)
        resumed.load_state_dict(state)
        assert batches_of(resumed) == whole[taken:]
        assert batches_of(resumed) == whole  # the next pass is a whole one
    wait_for_no_threads()


def test_a_loader_without_state_says_so(session: sr.Session) -> None:
    distributed(session)
    ahead = session.prefetch([matrix(0)])
    with pytest.raises(sr.errors.FailedPrecondition, match=r"the loader \(list\) has no state_dict"):
        ahead.state_dict()


def test_batches_with_many_ids_are_reduced_by_several_threads() -> None:
    """Each takes other tables, so rows are those of one thread."""
    rows, threads = {}, torch.get_num_threads()
    batches = [matrix(seed, rows=25_000) for seed in range(3)]
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            with connect() as session:
                model = distributed(session)
                for batch in session.prefetch(batches, depth=2):
                    model(batch).square().sum().backward()
                    session.step()
                assert session.stats().lookups_missed == 0
                rows[count] = rows_of(session)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(rows[1], rows[4], strict=True):
        np.testing.assert_array_equal(one, other)
