"""The MMoE model: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts"
(KDD 2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .feature_checks import check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature
from .mlp import mlp


class MMoE(nn.Module):
    """A model of several tasks, which mix the outputs of common experts, each by a gate of its own.

    With an input x of all embeddings and numbers, the output of task k is ``y_k = h_k(f_k(x))`` with
    ``f_k(x) = sum over experts i of g_k(x)_i f_i(x)`` and ``g_k(x) = softmax(W_k x)`` (section 4.2).
    Experts f_i and towers h_k are MLPs; a gate is one matrix.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        tasks: the names of the tasks, at least one.
        numbers, shared, pools, init_scale, sparse: as in ``FeatureEmbeddings``.
        dim: the width of an embedding.
        experts: the number of experts.
        expert: the widths of an expert, the last of which is that of its output.
        tower: the hidden widths of a task's tower.
        dropout: the share of units of experts and towers that are dropped while training.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        tasks: Sequence[str],
        *,
        numbers: Sequence[str] = (),
        shared: Mapping[str, str] | None = None,
        pools: Mapping[str, str] | None = None,
        dim: int = 16,
        experts: int = 4,
        expert: Sequence[int] = (64, 32),
        tower: Sequence[int] = (32,),
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(tasks, str) or not tasks or len(set(tasks)) < len(tasks):
            raise ValueError(f"tasks={tasks!r} is not allowed; allowed: a list of names, each of them once")
        if experts < 1 or not expert:
            raise ValueError(f"experts={experts}, expert={expert!r}: allowed: at least one expert with one layer")
        self.embeddings = FeatureEmbeddings(
            rows, dim, numbers=numbers, shared=shared, pools=pools, init_scale=init_scale, sparse=sparse
        )
        width = self.embeddings.width()
        self.tasks = tuple(tasks)
        self.experts = nn.ModuleList(mlp([width, *expert], dropout, activate_last=True) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in tasks)
        self.towers = nn.ModuleList(mlp([expert[-1], *tower, 1], dropout) for _ in tasks)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the features that forward takes; a job checks them before its workers start."""
        return self.embeddings.features

    def forward(self, **tensors: Feature) -> dict[str, Tensor]:
        """Returns the logits of samples by task, each (B) float32.

        Args:
            tensors: the features by name.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, self.embeddings.features)
        x = self.embeddings.flat(tensors)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits = {}
        for task, gate, tower in zip(self.tasks, self.gates, self.towers, strict=True):
            mixed = (torch.softmax(gate(x), dim=1)[:, :, None] * outputs).sum(dim=1)
            logits[task] = tower(mixed).squeeze(1)
        return logits
