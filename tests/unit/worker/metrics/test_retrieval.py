"""The rank of a user's item among all items, against a sort of all scores."""

from __future__ import annotations

import pytest
import torch

from sparserow.proto.errors import InvalidArgument
from sparserow.worker.metrics.retrieval import hit_rate, ranks_among_all


@pytest.mark.parametrize("block", [1, 70, 1 << 20])
def test_ranks_are_those_of_a_sort_of_all_scores(block: int) -> None:
    torch.manual_seed(3)
    users, items = torch.randn(37, 8), torch.randn(50, 8)
    positives = torch.randint(50, (37,))
    order = (users @ items.T).argsort(dim=1, descending=True)
    wanted = (order == positives[:, None]).int().argmax(dim=1)
    ranks = ranks_among_all(users, items, positives, block_scores=block)
    assert torch.equal(ranks, wanted)
    assert hit_rate(ranks, 10) == pytest.approx((wanted < 10).float().mean().item())


def test_equal_scores_are_no_hits() -> None:
    ranks = ranks_among_all(torch.ones(3, 2), torch.ones(101, 2), torch.tensor([0, 50, 100]))
    assert ranks.tolist() == [50, 50, 50]
    assert hit_rate(ranks, 10) == 0


def test_scores_that_are_not_numbers_are_no_hits() -> None:
    users = torch.tensor([[float("nan"), 1.0], [1.0, 1.0]])
    items = torch.eye(2).repeat(20, 1)
    ranks = ranks_among_all(users, items, torch.tensor([0, 0]))
    assert ranks.tolist() == [39, 19]
    items[7] = float("nan")
    assert ranks_among_all(users, items, torch.tensor([7, 0])).tolist() == [39, 39]


def test_shapes_and_items_are_checked() -> None:
    users, items = torch.ones(3, 2), torch.ones(5, 2)
    with pytest.raises(InvalidArgument, match=r"items: shape \(5, 3\) does not fit"):
        ranks_among_all(users, torch.ones(5, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match=r"positives: shape \(2,\)"):
        ranks_among_all(users, items, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match=r"allowed: 0 \.\. 4"):
        ranks_among_all(users, items, torch.tensor([0, 5, 1]))
