"""Adds to a distributed model the hooks that make the rows of its lookups before its forward."""

from __future__ import annotations

from torch import nn

from ..lookups.forward_hook import ForwardHook
from ..lookups.makers.joint import JointLookups
from ..lookups.makers.own_rank import OwnRank
from ..lookups.makers.tensor_group import hand_rows
from ..session.session import JobSession


def install_lookup_hooks(model: nn.Module, session: JobSession) -> None:
    """Adds the hooks to a model whose layers are distributed.

    Args:
        model: the root module.
        session: the session whose tables the model reads.
    """
    same_batch = hand_rows(model, session)
    ForwardHook(session, OwnRank(session), JointLookups(session, same_batch)).install(model)
