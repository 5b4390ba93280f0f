"""The Triton kernels of lookups give what torch's own operations give, bit for bit under the interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

CASES = [(1, 1, 1), (70, 20, 5), (60, 9, 130)]


@pytest.fixture
def reference(lookup_math: ModuleType, monkeypatch: pytest.MonkeyPatch) -> object:
    """The same functions without kernels."""

    class Reference:
        def __getattr__(self, name: str) -> object:
            def call(*args: object, **kwargs: object) -> object:
                with monkeypatch.context() as patch:
                    patch.setattr(lookup_math, "runs_kernels", lambda _: False)
                    return getattr(lookup_math, name)(*args, **kwargs)

            return call

    return Reference()


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.device.type == "cpu":
        assert torch.equal(one, other)
    else:  # kernels on CUDA fuse a multiplication and an addition
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def lookup(n: int, u: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + dim)
    rows = torch.randn(u, dim, generator=generator)
    positions = torch.randint(0, u, (n,), generator=generator, dtype=torch.int32)
    cuts = torch.sort(torch.randint(0, n + 1, (6,), generator=generator)).values
    cuts[2] = cuts[3]  # an empty bag
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([n])])
    return rows.to(device), positions.to(device), begins.to(device)


@pytest.mark.parametrize(("n", "u", "dim"), CASES)
def test_rows_by_position(
    lookup_math: ModuleType, reference: ModuleType, device: torch.device, n: int, u: int, dim: int
) -> None:
    rows, positions, _ = lookup(n, u, dim, device)
    assert lookup_math.runs_kernels(device)
    same(lookup_math.gather(rows, positions), reference.gather(rows, positions))


@pytest.mark.parametrize(("n", "u", "dim"), CASES)
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding", [-1, 0])
def test_pooled_rows_and_their_gradients(
    lookup_math: ModuleType,
    layouts: ModuleType,
    reference: ModuleType,
    device: torch.device,
    n: int,
    u: int,
    dim: int,
    mode: int,
    padding: int,
) -> None:
    rows, positions, begins = lookup(n, u, dim, device)
    bags = layouts.Bags(begins[:-1], begins[1:], n)
    weights = torch.randn(n, device=device) if mode == lookup_math.SUM and padding == 0 else None
    paddings = None if padding < 0 else torch.arange(bags.count, dtype=torch.int32, device=device) % u - 1
    out, places = lookup_math.pool(rows, positions, bags, mode=mode, weights=weights, paddings=paddings)
    expected, expected_places = reference.pool(rows, positions, bags, mode=mode, weights=weights, paddings=paddings)
    same(out, expected)
    grads = torch.randn(bags.count, dim, device=device)
    if mode == lookup_math.MAX:
        assert torch.equal(places, expected_places)
        entries = lookup_math.entries_of_max(grads, positions, places, rows=u)
        shape, size = (u * dim, 1), u * dim
    else:
        entries = lookup_math.entries_of_bags(
            grads, positions, bags, rows=u, mode=mode, weights=weights, paddings=paddings
        )
        shape, size = (u, dim), u
    sums, expected_sums = torch.empty(shape, device=device), torch.empty(shape, device=device)
    lookup_math.sum_entries([entries], size, sums)
    reference.sum_entries([entries], size, expected_sums)
    same(sums, expected_sums)


@pytest.mark.parametrize("mode", ["SUM", "MEAN"])
@pytest.mark.parametrize("length", [1, 3])
def test_bags_of_one_length_need_no_search(
    lookup_math: ModuleType, layouts: ModuleType, reference: ModuleType, device: torch.device, mode: str, length: int
) -> None:
    """They have the bits of bags whose lengths are not known."""
    rows, positions, _ = lookup(20 * length, 9, 6, device)
    alike, number = layouts.fixed_bags(((12, length), (8, length)), device), getattr(lookup_math, mode)
    assert alike.length == length
    grads = torch.randn(20, 6, device=device)
    found = []
    for bags in (alike, layouts.Bags(alike.begins, alike.ends, alike.size)):
        for math in (lookup_math, reference):
            sums = torch.empty(9, 6, device=device)
            math.sum_entries([math.entries_of_bags(grads, positions, bags, rows=9, mode=number)], 9, sums)
            found.append((math.pool(rows, positions, bags, mode=number)[0], sums))
    for pooled, sums in found[1:]:
        same(pooled, found[0][0])
        same(sums, found[0][1])


def test_sums_run_over_several_lookups_in_their_order(
    lookup_math: ModuleType, layouts: ModuleType, reference: ModuleType, device: torch.device
) -> None:
    _, positions, begins = lookup(50, 9, 6, device)
    bags = layouts.Bags(begins[:-1], begins[1:], 50)
    two = torch.full((50,), 2, dtype=torch.int32, device=device)
    one = lookup_math.entries_of_rows(torch.randn(50, 6, device=device), positions, rows=9, paddings=two)
    other = lookup_math.entries_of_bags(
        torch.randn(bags.count, 6, device=device), positions, bags, rows=9, mode=lookup_math.MEAN
    )
    sums, expected = torch.empty(9, 6, device=device), torch.empty(9, 6, device=device)
    lookup_math.sum_entries([one, other], 9, sums)
    reference.sum_entries([one, other], 9, expected)
    same(sums, expected)


def test_offsets_that_are_out_of_order_read_no_memory_of_others(
    lookup_math: ModuleType, layouts: ModuleType, device: torch.device
) -> None:
    rows, positions, _ = lookup(20, 5, 4, device)
    begins = torch.tensor([0, 90, -7, 15, 20], device=device)
    for mode in (lookup_math.SUM, lookup_math.MEAN, lookup_math.MAX):
        out, _ = lookup_math.pool(rows, positions, layouts.Bags(begins[:-1], begins[1:], 20), mode=mode)
        assert torch.isfinite(out).all()


def test_no_ids_are_nothing(lookup_math: ModuleType, layouts: ModuleType, device: torch.device) -> None:
    rows, none = torch.empty(0, 4, device=device), torch.empty(0, dtype=torch.int32, device=device)
    assert lookup_math.gather(rows, none).shape == (0, 4)
    bags = layouts.fixed_bags(((3, 0),), device)
    assert torch.equal(lookup_math.pool(rows, none, bags, mode=0)[0], torch.zeros(3, 4, device=device))
    sums = torch.empty(0, 4, device=device)
    lookup_math.sum_entries([lookup_math.entries_of_rows(rows, none, rows=0)], 0, sums)
