"""Ids on another device than the host are traced by what was done to them, and computed from a copy on the host.

``meta`` stands for a GPU: its tensors are plain tensors on another device. The device of ``tests/device`` has a
subclass of Tensor, which the trace does not follow.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparserow.worker.lookups.expressions import Values
from sparserow.worker.lookups.trace import ForwardTrace

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda ids: ids[:, 2],
    "range": lambda ids: ids[:, 1:3],
    "one of all columns": lambda ids: ids.unbind(1)[3],
    "cast": lambda ids: ids[:, 0].to(torch.int32),
    "arithmetic": lambda ids: (ids[:, 1] * 3 + 1) % 50,
    "flat": lambda ids: ids.t().reshape(-1),
}


def values_on_host(seed: int) -> Tensor:
    return torch.randint(0, 50, (6, 4), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_does_to_ids_on_a_device_is_followed(way: str) -> None:
    there = torch.empty_like(values_on_host(0), device="meta")
    assert type(there) is Tensor, "as tensors on CUDA are"
    with ForwardTrace(there) as trace:
        expression = trace.expression_of(WAYS[way](there))
    assert expression is not None
    later = values_on_host(1)
    found = Values(torch.empty_like(later, device="meta"), lambda _: later).of(expression)
    assert found is not None
    assert torch.equal(found, WAYS[way](later))


def test_ids_that_depend_on_a_tensor_made_in_the_forward_are_not_followed() -> None:
    there = torch.empty(6, 4, dtype=torch.int64, device="meta")
    with ForwardTrace(there) as trace:
        assert trace.expression_of(there % torch.full((4,), 7, device="meta")) is None
        assert trace.expression_of(torch.empty(6, dtype=torch.int64, device="meta")) is None
