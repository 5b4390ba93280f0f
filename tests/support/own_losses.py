"""Losses of one's own for jobs in tests. They use torch alone, as a user's file does."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional


def bce(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def mse(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores - labels).square()


def softmax(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels, reduction="none")


def focal(scores: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """The focal loss of Lin et al. 2017: samples that are predicted well count less."""
    losses = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return losses * (1 - torch.exp(-losses)) ** gamma


sharp_focal = functools.partial(focal, gamma=5.0)
of_torch = nn.BCEWithLogitsLoss(reduction="none")  # a module without parameters


def mean(scores: Tensor, labels: Tensor) -> Tensor:
    return bce(scores, labels).mean()


def column(scores: Tensor, labels: Tensor) -> Tensor:
    return bce(scores, labels)[:, None]


def double(scores: Tensor, labels: Tensor) -> Tensor:
    return bce(scores, labels).double()


def counted(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores > 0).long() + labels.long()


def cut_off(scores: Tensor, labels: Tensor) -> Tensor:
    return bce(scores.detach(), labels)


def apart(scores: Tensor, labels: Tensor) -> Tensor:
    return cut_off(scores, labels) * torch.ones((), requires_grad=True)


def of_numpy(scores: Tensor, labels: Tensor) -> object:
    return scores.detach().numpy() - labels.numpy()


def weighted(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return bce(scores, labels) * weights


def in_place(scores: Tensor, labels: Tensor) -> Tensor:
    return bce(scores, labels.mul_(0.9))


def fails(scores: Tensor, labels: Tensor) -> Tensor:
    raise ValueError("no such margin")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, scores: Tensor) -> Tensor:
        return scores.clone()

    @staticmethod
    def backward(_ctx: object, *_grads: Tensor) -> Tensor:
        raise ValueError("no such gradient")


def fails_backward(scores: Tensor, labels: Tensor) -> Tensor:
    found: Tensor = _Fails.apply(scores)
    return found


def logarithm(scores: Tensor, labels: Tensor) -> Tensor:
    """A loss of positive numbers, which is NaN where a score is not positive."""
    return torch.log(scores) + labels / scores


learnt = nn.PReLU()
number = 3


class Focal:
    """A class, which is no loss."""

    def __init__(self, scores: Tensor, labels: Tensor) -> None:
        pass
