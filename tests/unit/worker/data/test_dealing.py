"""Dealing an epoch's samples to workers, against a list of all positions."""

from __future__ import annotations

import os
import random
import secrets

from sparserow.worker.data.dealing import Dealing, Interval, merged


def positions(intervals: list[Interval] | tuple[Interval, ...]) -> list[int]:
    return [place for begin, end in intervals for place in range(begin, end)]


def test_whatever_workers_have_done_the_rest_is_left():
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"SPARSEROW_TEST_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(500):
        cuts = sorted(draw.sample(range(200), k=2 * draw.randrange(1, 4)))
        left = tuple(zip(cuts[::2], cuts[1::2], strict=True))
        dealing = Dealing(left, draw.randrange(1, 6), draw.randrange(1, 12), draw.random() < 0.5)
        shares = [list(dealing.shares(rank)) for rank in range(dealing.world)]
        assert {len(batches) for batches in shares} == {dealing.batches}
        everything = [place for batches in shares for batch in batches for place in positions(batch)]
        assert sorted(everything) == positions(left)
        assert all(len(positions(batch)) <= dealing.batch_size for batches in shares for batch in batches)
        if dealing.in_order:
            steps = [sorted(p for mine in shares for p in positions(mine[step])) for step in range(dealing.batches)]
            assert [place for step in steps for place in step] == positions(left)
        else:
            assert [place for mine in shares for batch in mine for place in positions(batch)] == positions(left)
        done = [draw.randrange(dealing.batches + 1) for _ in range(dealing.world)]
        rest = [p for mine, n in zip(shares, done, strict=True) for batch in mine[n:] for p in positions(batch)]
        assert positions(dealing.left_after(done)) == sorted(rest)
        rank = draw.randrange(dealing.world)
        assert list(dealing.shares(rank, done[rank])) == shares[rank][done[rank] :]


def test_nothing_is_left_at_the_end():
    dealing = Dealing(((0, 10),), 3, 4, in_order=True)
    assert dealing.left_after([dealing.batches] * 3) == ()
    assert Dealing((), 3, 4, in_order=False).batches == 0
    assert merged([(5, 7), (0, 5), (7, 7), (9, 10)]) == ((0, 7), (9, 10))
