"""A device that the machine does not have is refused by the name of the argument, before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparserow as sr

ABSENT = f"cuda:{torch.cuda.device_count() + 1}"


def test_prefetch_to_a_device_that_is_not_there() -> None:
    with sr.InProcessCluster(shards=1).connect("absent") as session:
        model = session.distribute(nn.Sequential(nn.Embedding(50, 4)), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        with pytest.raises(sr.errors.InvalidArgument, match=f"prefetch.device: '{ABSENT}' is not allowed; "):
            session.prefetch([torch.zeros(2, dtype=torch.int64)], device=ABSENT)
        with pytest.raises(
            sr.errors.InvalidArgument, match=r"prefetch.device: 'hpu' is not allowed; allowed: cpu, cuda"
        ):
            session.prefetch([torch.zeros(2, dtype=torch.int64)], device="hpu")
        model(torch.zeros(2, dtype=torch.int64)).sum().backward()
        assert session.step(), "the session goes on"
