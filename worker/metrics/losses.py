"""Losses of predictions, as functions of (logits, labels, weights) in torch.

Each loss is ``sum over i of w_i l_i, over B``: the weighted sum of the samples' losses over the number of samples, and
not over the sum of weights. So the gradient of a step is the mean of the gradients of its parts of equal size, however
its samples are cut into micro-batches or spread over workers. ``in_batch_softmax`` alone depends on the cut, as the
negatives of a sample are the other samples of its micro-batch. An empty batch has the loss 0, with gradients of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

# (logits, labels, weights or None) -> a scalar.
Loss: TypeAlias = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def bce(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Computes binary cross entropy: ``max(x, 0) - x y + log(1 + exp(-|x|))`` for a logit x and a label y.

    Args:
        logits: the logits, (B).
        labels: the labels, (B), in [0, 1].
        weights: the weight of each sample, (B); None: 1.

    Returns:
        A scalar of the dtype of ``logits``, and of float32 at least.

    Raises:
        ValueError: shapes do not fit; this holds for every loss of this module.
    """
    x = _wide("bce", logits, labels, dims=1)
    return _mean(functional.binary_cross_entropy_with_logits(x, labels.to(x.dtype), reduction="none"), weights)


def mse(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Computes the squared error: ``(x - y)^2`` for an output x and a label y.

    Args:
        logits: the outputs, (B).
        labels: the labels, (B), finite.
        weights: the weight of each sample, (B); None: 1.
    """
    x = _wide("mse", logits, labels, dims=1)
    return _mean((x - labels.to(x.dtype)).square(), weights)


def softmax(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Computes cross entropy over candidates: ``-log softmax(x)_y`` for logits x and the positive's index y.

    Args:
        logits: a logit of each candidate, (B, C).
        labels: the index of the positive, (B), integers in [0, C) of any dtype.
        weights: the weight of each sample, (B); None: 1.
    """
    x = _wide("softmax", logits, labels, dims=2)
    return _mean(functional.cross_entropy(x, labels.long(), reduction="none"), weights)


def bpr(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Computes the loss of Bayesian personalised ranking: ``-log sigmoid(x_y - x_j)``, the mean over negatives j.

    The formula is that of Rendle et al., "BPR: Bayesian Personalized Ranking from Implicit Feedback" (2009), section
    4.1, without the regularisation, which the optimizers have as weight decay.

    Args:
        logits: a logit of each candidate, (B, C) with C >= 2; the positive and its negatives.
        labels: the index of the positive, (B), integers in [0, C) of any dtype.
        weights: the weight of each sample, (B); None: 1.
    """
    x = _wide("bpr", logits, labels, dims=2)
    if x.shape[1] < 2:
        raise ValueError(f"bpr: logits of shape {tuple(x.shape)} have no negative; allowed: 2 candidates or more")
    positives = labels.long()[:, None]
    losses = functional.softplus(x - x.gather(1, positives)).scatter(1, positives, 0.0)
    return _mean(losses.sum(dim=1) / (x.shape[1] - 1), weights)


def in_batch_softmax(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    logq: Tensor | None = None,
    items: Tensor | None = None,
) -> Tensor:
    """Computes cross entropy of each sample's item among the items of the batch: ``-r_i log softmax(x_i - logq)_i``.

    A frequent item is in more batches, and so it is a negative more often than others. Subtracting the logarithm of its
    probability to be in a batch corrects for that: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus
    Item Recommendations" (RecSys 2019), section 3.

    Args:
        logits: the score of each user with each item of the batch, (B, B); the diagonal has the samples' own items.
        labels: the reward r of each sample, (B), finite and >= 0: 1 for a click.
        weights: the weight of each sample, (B); None: 1.
        logq: the logarithm of the sampling probability of each item, (B); None: all are equal.
        items: the key of each item, (B) int64: samples of the same item are then no negatives of each other. None: all
            other samples are negatives.
    """
    x = _wide("in_batch_softmax", logits, labels, dims=2)
    if x.shape[0] != x.shape[1]:
        raise ValueError(f"in_batch_softmax: logits of shape {tuple(x.shape)} are not allowed; allowed: (B, B)")
    for name, given in (("logq", logq), ("items", items)):
        if given is not None and given.shape != labels.shape:
            raise ValueError(f"in_batch_softmax: {name} has shape {tuple(given.shape)}; allowed: {tuple(labels.shape)}")
    if logq is not None:
        x = x - logq.to(x.dtype)
    if items is not None:
        is_other = ~torch.eye(len(items), dtype=torch.bool, device=items.device)
        x = x.masked_fill((items[:, None] == items) & is_other, -math.inf)
    losses = x.logsumexp(dim=1) - x.diagonal() if len(x) else x.sum(dim=1)
    return _mean(labels.to(x.dtype) * losses, weights)


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {"bce": bce, "mse": mse, "softmax": softmax, "bpr": bpr, "in_batch_softmax": in_batch_softmax}
)


def check_labels(name: str, labels: Tensor, *, candidates: int | None = None, are_rewards: bool = False) -> None:
    """Checks the labels of a batch before a loss reads them.

    Args:
        name: the name of the loss, one of LOSSES.
        labels: the labels, (B).
        candidates: the number of candidates, where the labels are indexes of them; None: any.
        are_rewards: whether the labels are rewards of the samples, whose positives are known otherwise; those of
            "in_batch_softmax" are.

    Raises:
        ValueError: there is no such loss, or a label is not allowed; the text has the first such label, its sample and
            what is allowed.
    """
    if name not in LOSSES:
        raise ValueError(f"loss={name!r} is not allowed; allowed: {', '.join(LOSSES)}")
    if name == "bce":
        is_good, allowed = (labels >= 0) & (labels <= 1), "0 to 1"
    elif name == "mse":
        is_good, allowed = torch.isfinite(labels), "finite numbers"
    elif are_rewards or name == "in_batch_softmax":
        is_good, allowed = torch.isfinite(labels) & (labels >= 0), "finite numbers >= 0"
    else:
        most = math.inf if candidates is None else candidates - 1
        is_good = (labels >= 0) & (labels <= most) & (labels == labels.floor())
        allowed = f"the index of a candidate, an integer >= 0{'' if candidates is None else f' and < {candidates}'}"
    if not bool(is_good.all()):
        sample = int((~is_good).nonzero()[0])
        raise ValueError(
            f"labels: {labels[sample].item()} of sample {sample} is not allowed by {name}; allowed: {allowed}"
        )


def undo_downsampling(probabilities: Tensor, rate: float) -> Tensor:
    """Returns probabilities as if negatives had not been down-sampled: ``p / (p + (1 - p) / w)``.

    The formula is that of He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook" (2014), section 6.3.

    Args:
        probabilities: the predictions of a model that was trained on a part of the negatives.
        rate: the share w of negatives that was kept, in (0, 1].

    Raises:
        ValueError: ``rate`` is not in (0, 1].
    """
    _check_rate(rate)
    return probabilities / (probabilities + (1 - probabilities) / rate)


def undo_downsampling_of_logits(logits: Tensor, rate: float) -> Tensor:
    """Returns the logits of :func:`undo_downsampling`, ``logit + log(w)``, which loses no precision near 0 and 1.

    Args:
        logits: the logits of a model that was trained on a part of the negatives.
        rate: the share w of negatives that was kept, in (0, 1].

    Raises:
        ValueError: ``rate`` is not in (0, 1].
    """
    _check_rate(rate)
    return logits + math.log(rate)


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise ValueError(f"rate={rate} is not allowed; allowed: > 0 and <= 1, the share of negatives that was kept")


def _wide(name: str, logits: Tensor, labels: Tensor, *, dims: int) -> Tensor:
    """Returns the logits in float32 at least, after a check of the shapes, which torch would broadcast."""
    if logits.dim() != dims or labels.shape != logits.shape[:1]:
        shapes = "logits (B)" if dims == 1 else "logits (B, C)"
        raise ValueError(
            f"{name}: logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} are not allowed; "
            f"allowed: {shapes} and labels (B)"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the sum of weights times losses over the number of samples; 0 for no samples."""
    if weights is not None:
        if weights.shape != losses.shape:
            raise ValueError(f"weights of shape {tuple(weights.shape)} are not allowed; allowed: {tuple(losses.shape)}")
        losses = losses * weights.to(losses.dtype)
    return losses.sum() / max(len(losses), 1)
