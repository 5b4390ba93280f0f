"""Simulated policies against traces whose hits are known, and against each other."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from sparserow.deploy.bench.eviction_policies import POLICIES, hit_share


def share(policy: str, batches: list[list[int]], resident: list[int], measured: int | None = None) -> float:
    keys = [np.array(batch, np.uint64) for batch in batches]
    return hit_share(policy, keys, np.array(resident, np.uint64), measured or len(batches))


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        ("lru", [1, 1, 1, 0, 0, 0]),  # 9 evicts 2, which evicts 1
        ("lfu", [1, 1, 1, 0, 1, 0]),  # 9 evicts 1, which has fewer uses than 2
        ("belady", [1, 1, 1, 0, 1, 1]),  # 9 is not kept, because it is not used again
    ],
)
def test_a_short_trace_has_the_hits_that_its_policy_says(policy: str, hits: list[int]) -> None:
    trace = [[2], [2], [1], [9], [2], [1]]
    for length in range(1, len(trace) + 1):
        # What a policy does must not depend on where the trace ends; but Belady's knows the whole of it.
        measured = trace if policy == "belady" else trace[:length]
        assert share(policy, measured, [1, 2]) == pytest.approx(sum(hits[: len(measured)]) / len(measured))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_fits_is_always_there(policy: str) -> None:
    trace = [[1, 2, 3], [3, 2, 1], [2]]
    assert share(policy, trace, [1, 2, 3]) == 1.0
    assert share(policy, [[4, 5, 6]], [1, 2, 3]) == 0.0


def best(batches: list[list[int]], resident: frozenset[int], at: int = 0) -> int:
    """Returns the most hits of any choice of rows, by trying all."""
    if at == len(batches):
        return 0
    (key,) = batches[at]
    choices = combinations(resident | {key}, len(resident))
    return (key in resident) + max(best(batches, frozenset(each), at + 1) for each in choices)


def test_belady_is_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        trace = [[int(key)] for key in rng.integers(4, size=8)]
        assert share("belady", trace, [0, 1]) == pytest.approx(best(trace, frozenset({0, 1})) / len(trace))


def test_policies_under_a_law_of_popularity_lie_between_chance_and_belady() -> None:
    rng = np.random.default_rng(7)
    rows, room = 2_000, 200
    weights = 1 / np.arange(1, rows + 1)
    trace = [rng.choice(rows, size=60, p=weights / weights.sum()) for _ in range(200)]
    keys = [np.unique(batch).astype(np.uint64) for batch in trace]
    resident = np.arange(rows - room, rows, dtype=np.uint64)  # the rarest
    shares = {policy: hit_share(policy, keys, resident, 100) for policy in POLICIES}
    assert shares["belady"] > max(shares[policy] for policy in POLICIES if policy != "belady")
    assert all(room / rows * 3 < value < 1 for value in shares.values()), shares
    assert shares["s3-fifo"] > shares["lru"] - 0.02, shares
