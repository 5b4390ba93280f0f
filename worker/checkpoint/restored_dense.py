"""The dense side of a restore: the model and its optimizer, whole or in parts, and whether they fit a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ...proto.checkpoint.dense_files import TREE
from ...proto.checkpoint.folder import Folder
from ...proto.errors import FailedPrecondition, InvalidArgument, NotFound
from ..layers.table_handle import renamed
from ..session.compiled_module import bare
from .dense_state import check_state, load_fitting, load_optimizer_of_fitting, load_state, plain_state
from .every_rank import is_in_parts, on_every_rank
from .restored_states import RestoredStates


class StatesOfRanks(Protocol):
    """The states of the workers in a checkpoint."""

    def of_rank(self, rank: int) -> dict[str, Any] | None:
        """Returns the state tree of a rank; None when the checkpoint has none for it."""


@dataclass(frozen=True)
class RestoredDense:
    """Loads the dense side, whether ranks have it in parts or whole.

    Attributes:
        folder: the folder of the checkpoint.
        model: the model to load; None: no model is loaded.
        optimizer: the dense optimizer to load; None: none is loaded.
        renames: {full name of a table in the checkpoint: present full name}.
        strict: whether the model must have the tensors of the checkpoint.
        anew: names of tensors that were not loaded, after :meth:`load_model`.
    """

    folder: Folder
    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    renames: Mapping[str, str]
    strict: bool
    anew: list[str] = field(default_factory=list)

    def check(self, states: StatesOfRanks, asked: RestoredStates, rank: int) -> None:
        """Checks, before anything is changed, that the checkpoint has what is asked for, and that it fits.

        Args:
            states: the states of the checkpoint.
            asked: what is asked for beside the model.
            rank: this worker's rank.

        Raises:
            NotFound: a state is absent.
            FailedPrecondition: names or shapes differ. With parts every rank raises what one raises.
            DataLoss: a state is damaged.
        """
        first, mine = states.of_rank(0), states.of_rank(rank)
        try:
            if is_in_parts(self.model):
                on_every_rank(lambda: self._check(first, mine, asked, rank))
            else:
                self._check(first, mine, asked, rank)
        except (NotFound, FailedPrecondition, InvalidArgument) as error:
            raise type(error)(f"{error}; nothing was changed") from None

    def _check(
        self, first: Mapping[str, Any] | None, mine: Mapping[str, Any] | None, asked: RestoredStates, rank: int
    ) -> None:
        asked.check(first, mine, rank, self.folder.url, model=self.model is not None, strict=self.strict)
        first = first or {}
        if not self.strict:
            self._check_parts(first)
            return
        if TREE in first and self.model is None:
            self._refuse_without_model()
        elif self.model is not None and TREE in first:
            from .dense_parts import check_model  # slow to import

            check_model(self.folder, first[TREE], bare(self.model))
        elif self.model is not None:
            check_state(self.model, self._present(first["model"]), self.folder.url)

    def _check_parts(self, first: Mapping[str, Any]) -> None:
        """Checks what a restore needs that is not strict."""
        if TREE in first or is_in_parts(self.model):
            raise FailedPrecondition(
                f"restore.strict: False is not possible for {self.folder.url}, as ranks have the model in parts; build "
                "the same model"
            )
        if self.optimizer is not None and not first.get("parameters"):
            raise FailedPrecondition(
                f"restore.strict: False needs the names of the optimizer's parameters, and {self.folder.url} has none, "
                "as it was saved without a model; leave optimizer out"
            )

    def _refuse_without_model(self) -> None:
        if self.optimizer is not None:
            raise InvalidArgument(
                f"restore.optimizer: {self.folder.url} has the dense side in parts, whose names are those of the "
                "model; give model too"
            )

    def _present(self, state: Mapping[str, Any]) -> dict[str, Any]:
        assert self.model is not None
        return renamed(plain_state(state, self.model), self.renames)

    def load_parts(self, saved: Mapping[str, Any]) -> None:
        """Loads files of parts, which every rank reads together."""
        from .dense_parts import load_parts  # slow to import

        if self.model is not None:
            load_parts(self.folder, saved, bare(self.model), self.optimizer, self.renames)
        else:
            self._refuse_without_model()

    def load_model(self, state: dict[str, Any]) -> None:
        """Loads a whole state of the model."""
        assert self.model is not None
        present = self._present(state)
        if is_in_parts(self.model):
            from .dense_parts import load_whole_model  # slow to import

            load_whole_model(bare(self.model), present)
        elif self.strict:
            load_state(self.model, present)
        else:
            self.anew.extend(load_fitting(self.model, present))

    def load_optimizer(self, tree: Mapping[str, Any]) -> None:
        """Loads a whole state of the optimizer from the state of rank 0."""
        assert self.optimizer is not None
        state = tree["optimizer"]
        if not self.strict and self.model is not None:
            load_optimizer_of_fitting(self.model, self.optimizer, tree, self.anew)
        elif self.model is not None and is_in_parts(self.model):
            from .dense_parts import load_whole_optimizer  # slow to import

            load_whole_optimizer(bare(self.model), self.optimizer, state)
        else:
            self.optimizer.load_state_dict(state)
