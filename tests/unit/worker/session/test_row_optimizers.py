"""The optimizers that a user may name for rows, and the refusal of the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import sparserow as sr
from sparserow.worker.session.row_optimizers import row_optimizer_of

PARAMETER = [nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (sr.optim.SGD(lr=0.5), sr.optim.SGD(lr=0.5)),
        (sr.optim.RowWiseAdagrad, sr.optim.RowWiseAdagrad()),
        (optim.SGD, sr.optim.SGD(lr=1e-3)),
        (optim.Adagrad, sr.optim.Adagrad(lr=1e-2)),
        (optim.Adam, sr.optim.Adam(lr=1e-3)),
        (partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), sr.optim.SGD(0.1, momentum=0.9, nesterov=True)),
        (optim.Adagrad(PARAMETER, lr=0.2, initial_accumulator_value=0.5, eps=1e-6, weight_decay=0.1),
         sr.optim.Adagrad(0.2, eps=1e-6, initial_accumulator=0.5, weight_decay=0.1)),
        (optim.Adam(PARAMETER, lr=0.2, betas=(0.8, 0.9), fused=False), sr.optim.Adam(0.2, betas=(0.8, 0.9))),
        (optim.Adam(PARAMETER, lr=torch.tensor(0.25)), sr.optim.Adam(0.25)),
        (optim.Adam(PARAMETER, amsgrad=True), sr.optim.Adam(amsgrad=True)),
        (sr.optim.AdamW, sr.optim.Adam(weight_decay=0.01, decoupled=True)),
        (sr.optim.AdamW(0.5, amsgrad=True), sr.optim.Adam(0.5, weight_decay=0.01, decoupled=True, amsgrad=True)),
        (optim.AdamW, sr.optim.AdamW()),
        (optim.AdamW(PARAMETER, lr=0.5, weight_decay=0.25), sr.optim.AdamW(0.5, weight_decay=0.25)),
        (optim.RMSprop, sr.optim.RMSprop()),
        (optim.RMSprop(PARAMETER, lr=0.5, alpha=0.75, eps=1e-6, momentum=0.5, centered=True, weight_decay=0.1),
         sr.optim.RMSprop(0.5, alpha=0.75, eps=1e-6, momentum=0.5, centered=True, weight_decay=0.1)),
        (optim.Adadelta, sr.optim.Adadelta()),
        (partial(optim.Adadelta, rho=0.5, eps=1e-3, weight_decay=0.1),
         sr.optim.Adadelta(rho=0.5, eps=1e-3, weight_decay=0.1)),
        (sr.optim.FTRL, sr.optim.FTRL()),
    ],
)  # fmt: skip
def test_a_counterpart_has_the_options_of_torch(given: Any, wanted: Any) -> None:
    assert row_optimizer_of(given, "distribute.optimizer") == wanted


def stepped() -> optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    return optimizer


class Own(optim.SGD):
    """A user's own."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (optim.NAdam, r"torch\.optim\.NAdam has no counterpart on the servers; allowed: sr\.optim\.SGD, .*\.Adam"),
        (optim.NAdam(PARAMETER), r"torch\.optim\.NAdam has no counterpart"),
        (optim.SparseAdam, r"SparseAdam has no counterpart"),
        (Own, r"Own has no counterpart"),
        (Own(PARAMETER), r"Own has no counterpart"),
        (optim.AdamW(PARAMETER, maximize=True), r"AdamW with maximize=True has no counterpart"),
        (optim.Adagrad(PARAMETER, lr_decay=0.1), r"Adagrad with lr_decay=0\.1 has no counterpart"),
        (partial(optim.SGD, maximize=True), r"SGD with maximize=True has no counterpart"),
        (partial(optim.SGD, lr=-1.0), r"torch\.optim\.SGD: Invalid learning rate"),
        (partial(optim.SGD, rate=1.0), r"unexpected keyword argument 'rate'"),
        (optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]},
                    {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5}]), "2 groups with different options"),
        (stepped(), "has stepped, and its state would be lost"),
        ("adam", r"'adam' is not allowed; allowed: sr\.optim\.SGD"),
        (None, r"None is not allowed; allowed: sr\.optim\.SGD"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(
        (sr.errors.InvalidArgument, sr.errors.FailedPrecondition), match=rf"^distribute\.optimizer: .*{words}"
    ):
        row_optimizer_of(given, "distribute.optimizer")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sr.optim.Adam(betas=(1.0, 0.9)),
            r"Adam\.betas: \(1\.0, 0\.9\) is .* a pair of numbers in \[0, 1\)",
        ),
        (lambda: sr.optim.Adam(betas=0.9), r"Adam\.betas: 0\.9 is not allowed; allowed: a pair of numbers in \[0, 1\)"),
        (lambda: sr.optim.Lion(betas=(0.9,)), r"Lion\.betas: \(0\.9,\) is not allowed; allowed: a pair of numbers"),
        (lambda: sr.optim.LAMB(betas="ab"), r"LAMB\.betas: 'ab' is not allowed; allowed: a pair of numbers"),
        (lambda: sr.optim.AdamW(weight_decay=-1.0), r"Adam\.weight_decay: -1\.0 is not allowed; allowed: >= 0"),
        (lambda: sr.optim.SGD(decoupled="yes"), r"SGD\.decoupled: 'yes' is not allowed; allowed: True, False"),
        (lambda: sr.optim.SGD(lr="fast"), r"SGD\.lr: 'fast' is not allowed; allowed: a finite number"),
        (lambda: sr.optim.Adagrad(accumulator_decay=0.0), r"Adagrad\.accumulator_decay: 0\.0 .*; allowed: \(0, 1\]"),
        (lambda: sr.optim.RMSprop(alpha=1.5), r"RMSprop\.alpha: 1\.5 is not allowed; allowed: \[0, 1\)"),
        (lambda: sr.optim.Adadelta(eps=0.0), r"Adadelta\.eps: 0\.0 is not allowed; allowed: > 0"),
        (lambda: sr.optim.Lion(lr=float("nan")), r"Lion\.lr: nan is not allowed"),
        (lambda: sr.optim.LAMB(eps=float("inf")), r"LAMB\.eps: inf is not allowed"),
        (lambda: sr.optim.FTRL(beta=0.0), r"FTRL\.beta: 0\.0 is not allowed; allowed: > 0"),
        (lambda: sr.optim.FTRL(group_lasso=-0.5), r"FTRL\.group_lasso: -0\.5 is not allowed; allowed: >= 0"),
    ],
)
def test_a_bad_option_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=rf"^{words}"):
        make()
