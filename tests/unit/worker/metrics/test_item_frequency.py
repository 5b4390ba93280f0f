"""The estimate of how often an item is in a batch: the recursion, its mean, collisions, and checkpoints."""

from __future__ import annotations

import math

import pytest
import torch

from sparserow.worker.metrics.item_frequency import ItemFrequency


def test_it_is_the_recursion_of_the_paper_once_the_first_intervals_are_averaged():
    frequency = ItemFrequency(buckets=1 << 16, hashes=1, rate=0.25)
    generator = torch.Generator().manual_seed(0)
    last, mean, seen = 0, 0.0, 0
    for t in range(1, 200):
        is_there = bool(torch.rand(1, generator=generator) < 0.3)
        found = frequency.update(torch.tensor([5, 7, 5] if is_there else [7]))
        if is_there:
            seen += 1
            a = max(0.25, 1 / seen)
            last, mean = t, (1 - a) * mean + a * (t - last)
            assert found[0].item() == found[2].item() == pytest.approx(-math.log(mean), rel=1e-5, abs=1e-6)
        assert found[1 if is_there else 0].item() == pytest.approx(0.0, abs=1e-6)  # 7 is in every batch


def test_probabilities_are_found():
    frequency = ItemFrequency(buckets=1 << 16, rate=0.005)
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.tensor([0.8, 0.4, 0.1, 0.05])
    keys = torch.tensor([2**62, 11, 7, 2**40 + 1])
    for _ in range(4000):
        frequency.update(keys[torch.rand(4, generator=generator) < probabilities])
    torch.testing.assert_close(frequency.logq(keys).exp(), probabilities, rtol=0.25, atol=0)


def test_it_follows_a_change():
    frequency = ItemFrequency(buckets=1 << 10, rate=0.1)
    for t in range(500):
        frequency.update(torch.tensor([1]) if t % 10 == 0 else torch.zeros(0, dtype=torch.int64))
    assert frequency.logq(torch.tensor([1])).exp().item() == pytest.approx(0.1, rel=0.1)
    for _ in range(100):
        frequency.update(torch.tensor([1]))
    assert frequency.logq(torch.tensor([1])).exp().item() == pytest.approx(1.0, rel=0.1)


def test_more_hashes_make_fewer_mistakes():
    """In 1,024 buckets, 500 rare items and 100 frequent ones collide; a rare one then looks frequent."""
    errors = []
    for hashes in (1, 4):
        frequency = ItemFrequency(buckets=1 << 10, hashes=hashes, rate=0.02)
        for t in range(400):
            rare = torch.arange(500)[torch.arange(500) % 50 == t % 50] + 1000  # once in 50 batches
            frequency.update(torch.cat([torch.arange(100), rare]))
        errors.append((frequency.logq(torch.arange(500) + 1000) + math.log(50)).abs().mean().item())
    assert errors[1] < 0.3 * errors[0]


def test_what_was_never_seen_has_one_batch_of_those_so_far():
    frequency = ItemFrequency(buckets=1 << 16)
    assert frequency.logq(torch.tensor([3])).item() == 0.0
    for _ in range(20):
        frequency.update(torch.tensor([4]))
    assert frequency.logq(torch.tensor([3])).item() == pytest.approx(-math.log(20))
    assert frequency.logq(torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_the_last_interval_alone_counts_with_rate_1():
    frequency = ItemFrequency(buckets=4, rate=1)
    frequency.update(torch.tensor([3]))
    frequency.update(torch.zeros(0, dtype=torch.int64))
    frequency.update(torch.zeros(0, dtype=torch.int64))
    assert frequency.update(torch.tensor([3])).item() == pytest.approx(-math.log(3))


def test_a_checkpoint_continues_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 2**63 - 1, (30,), generator=generator) % 50 for _ in range(40)]
    whole, first = ItemFrequency(buckets=1 << 8), ItemFrequency(buckets=1 << 8)
    for batch in batches[:20]:
        whole.update(batch)
        first.update(batch)
    state = first.state_dict()
    first.update(batches[0])  # changes nothing of the state that was taken
    second = ItemFrequency(buckets=1 << 8)
    second.load_state_dict(state)
    for batch in batches[20:]:
        assert torch.equal(whole.update(batch), second.update(batch))


def test_what_does_not_fit_is_refused():
    for options, text in (
        ({"buckets": 100}, "buckets=100 is not allowed; allowed: a power of 2"),
        ({"buckets": 1}, "buckets=1 is not allowed"),
        ({"hashes": 5}, "hashes=5 is not allowed; allowed: 1 to 4"),
        ({"rate": 0}, "rate=0 is not allowed; allowed: > 0 and <= 1"),
    ):
        with pytest.raises(ValueError, match=text):
            ItemFrequency(**options)
    frequency = ItemFrequency(buckets=4, hashes=1)
    state = frequency.state_dict()
    with pytest.raises(ValueError, match=r"'last' is torch.int64 of \(2, 8\); allowed: torch.int64 of \(1, 4\)"):
        frequency.load_state_dict(ItemFrequency(buckets=8).state_dict())
    del state["count"]
    with pytest.raises(ValueError, match="'count' is missing"):
        frequency.load_state_dict(state)
