"""Slot maps: even, covering, and the same after a round trip through runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from sparserow.proto.errors import InvalidArgument
from sparserow.proto.route import owners_of_runs, runs_of_owners
from sparserow.ps_server.coordinator.state.slots import SlotMap

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other tests run beside these


@PATIENT
@given(st.integers(1, 16), st.integers(1, 300))
def test_every_slot_has_one_owner_and_shares_differ_by_one_at_most(bits: int, shards: int) -> None:
    slot_count = 2**bits
    if shards > slot_count:
        with pytest.raises(InvalidArgument, match="shards"):
            SlotMap.even(slot_count, shards)
        return
    slots = SlotMap.even(slot_count, shards)
    shares = [slots.slots_of(shard) for shard in range(shards)]
    assert slots.owners.dtype == np.uint16
    assert sum(shares) == slots.slot_count == slot_count
    assert max(shares) - min(shares) <= 1
    assert len(slots.runs()) == shards
    again = SlotMap.from_runs(slots.epoch, slot_count, slots.runs())
    assert np.array_equal(again.owners, slots.owners)


@PATIENT
@given(st.lists(st.integers(0, 3), min_size=16, max_size=16))
def test_any_owners_survive_the_runs(owners: list[int]) -> None:
    array = np.array(owners, np.uint16)
    assert np.array_equal(owners_of_runs(runs_of_owners(array), 16), array)


@pytest.mark.parametrize(
    ("runs", "slot_count", "words"),
    [
        ([(0, 0)], 12, "power of two"),
        ([(0, 0)], 2**17, "power of two"),
        ([], 16, "start at slot 0"),
        ([(1, 0)], 16, "start at slot 0"),
        ([(0, 0), (0, 1)], 16, "ascend"),
        ([(0, 0), (16, 1)], 16, "ascend"),
        ([(0, 70000)], 16, "shard indexes"),
    ],
)
def test_broken_routes_are_refused(runs, slot_count, words) -> None:
    with pytest.raises(InvalidArgument, match=words):
        owners_of_runs(runs, slot_count)
