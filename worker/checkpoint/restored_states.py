"""Checks, before a restore changes anything, that a checkpoint has the states it is asked for and that they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ...proto.checkpoint.dense_files import TREE
from ...proto.errors import FailedPrecondition, NotFound
from .save import OneOrMore, SharedReader, Stateful, several

_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})  # torch's put them there


@dataclass(frozen=True)
class RestoredStates:
    """What a restore is asked to load beside the model; None: it is not asked for that."""

    optimizer: torch.optim.Optimizer | None
    scaler: GradScaler | None
    scheduler: OneOrMore | None
    reader: Stateful | None

    def check(
        self,
        first: Mapping[str, Any] | None,
        mine: Mapping[str, Any] | None,
        rank: int,
        where: str,
        *,
        model: bool,
        strict: bool,
    ) -> None:
        """Checks the states of a checkpoint.

        Args:
            first: the state of rank 0; None: the checkpoint has none.
            mine: that of this worker's rank; None: the checkpoint has none.
            rank: this worker's rank, for error texts.
            where: the URL of the checkpoint, for error texts.
            model: whether the restore loads a model.
            strict: whether the model must have the tensors of the checkpoint.

        Raises:
            NotFound: the checkpoint lacks a state.
            FailedPrecondition: the optimizer is of another kind than that of the checkpoint, or has other groups.
        """
        is_in_parts = first is not None and TREE in first
        reader = None if isinstance(self.reader, SharedReader) else self.reader
        for what, is_asked, tree in (
            ("model", model and not is_in_parts, first),
            ("optimizer", self.optimizer is not None and not is_in_parts, first),
            ("scaler", self.scaler is not None, mine or first),
            ("schedulers", self.scheduler is not None, mine or first),
            ("reader", reader is not None, mine),
        ):
            if is_asked and (tree is None or what not in tree):
                raise no_state(where, what, rank)
        if self.optimizer is not None and first is not None and "optimizer" in first:
            _check_groups(self.optimizer, first["optimizer"], where, strict=strict)
        if self.scheduler is not None:
            check_count(self.scheduler, (mine or first or {})["schedulers"], where)


def no_state(where: str, what: str, rank: int) -> NotFound:
    """Returns the error of a checkpoint that lacks a state."""
    return NotFound(f"restore: {where} has no state of the {what} of rank {rank}")


def check_count(scheduler: OneOrMore, states: list[Any], where: str) -> None:
    """Checks that there are as many schedulers as states of schedulers.

    Raises:
        NotFound: there are not.
    """
    count = len(several(scheduler))
    if count != len(states):
        raise NotFound(f"restore: {where} has the state of {len(states)} schedulers, but {count} are given")


def _check_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], where: str, *, strict: bool) -> None:
    """Checks sizes and options of parameter groups, unless the class of the optimizer loads states in its own way."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or "param_groups" not in state:
        return
    saved = [len(group["params"]) for group in state["param_groups"]]
    given = [len(group["params"]) for group in optimizer.param_groups]
    if saved != given if strict else len(saved) != len(given):
        raise FailedPrecondition(
            f"restore: {where} has another optimizer: its parameter groups have {saved} parameters there and {given} "
            "here; give the optimizer the same groups"
        )
    for group, was in zip(optimizer.param_groups, state["param_groups"], strict=True):
        mine, theirs = (sorted(a.keys() - b.keys() - _OF_SCHEDULES) for a, b in ((group, was), (was, group)))
        if mine and theirs:  # versions of torch add options to a kind, and take none away
            raise FailedPrecondition(
                f"restore: {where} has the state of another kind of optimizer, with the option {theirs[0]!r}, which "
                f"{type(optimizer).__name__} lacks; give the kind of optimizer that was saved"
            )
