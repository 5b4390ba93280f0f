"""The SASRec model: Kang & McAuley, "Self-Attentive Sequential Recommendation" (ICDM 2018)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .causal_block import CausalBlock
from .feature_checks import check_features, list_of
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature, padded

_NO_CANDIDATE = -1e4  # the logit of a place without a candidate: exp gives 0, and no gradient is NaN


class SASRec(nn.Module):
    """A model of the next item of a sequence, by causal self-attention over the items so far.

    The input is the embedding of an item plus that of its position, counted from the end of the sequence (section
    III-A). After the blocks and a last normalisation, the state F of the last item is the vector of the user, and the
    score of a candidate i is ``<F, M_i>`` with the embedding M_i of the same table (section III-D).

    With a list of candidates, the positive first, forward gives a logit for each candidate: the losses "softmax" and
    "bpr" take them, with the label 0. With one next item a sample, it gives the scores with the items of the whole
    batch, for the loss "in_batch_softmax". A row of data trains the prediction that follows its last item; the paper
    trains those after all items of a sequence, which is a row for each prefix, or a loop of one's own over
    :meth:`states`.

    Args:
        rows: the number of rows of the items' table, by the feature ``item``.
        item: the feature of the next item or of the candidates, which names the table.
        history: the feature of the sequence, the newest item last.
        dim: the width of an embedding and of a state.
        max_len: the number of newest items of a sequence that are read.
        candidates: the largest number of candidates of a sample, where there are lists of them.
        blocks: the number of blocks.
        heads: the number of heads, a divisor of ``dim``.
        dropout: the share of units that are dropped while training.
        init_scale: initial weights of tables and positions are uniform in [-init_scale, init_scale).
        sparse: whether local tables produce sparse gradients.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        item: str,
        history: str,
        *,
        dim: int = 64,
        max_len: int = 50,
        candidates: int = 100,
        blocks: int = 2,
        heads: int = 1,
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if list(rows) != [item]:
            raise ValueError(f"rows={dict(rows)} is not allowed; allowed: the rows of item={item!r} alone")
        if heads < 1 or dim % heads:
            raise ValueError(f"heads={heads} is not allowed; allowed: a divisor of dim={dim}")
        if max_len < 1 or candidates < 1:
            raise ValueError(f"max_len={max_len}, candidates={candidates}: allowed: >= 1")
        self.item, self.history, self.max_len, self.candidates = item, history, max_len, candidates
        self.embeddings = FeatureEmbeddings(rows, dim, shared={history: item}, init_scale=init_scale, sparse=sparse)
        self.positions = nn.Parameter(torch.empty(max_len, dim).uniform_(-init_scale, init_scale))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(CausalBlock(dim, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the features that forward takes; a job checks them before its workers start."""
        return self.embeddings.features

    def forward(self, **tensors: Feature) -> Tensor:
        """Returns logits: (B, candidates) float32 for lists of candidates, else (B, B) for the next items of the batch.

        A sample with fewer candidates has the logit -10,000 at the places behind them. An empty history has the scores
        0.

        Args:
            tensors: the sequence, and the next item (B) or candidates, by name.

        Raises:
            ValueError: a feature is missing, not read or of another kind, or a list of candidates is too long.
        """
        check_features(tensors, self.embeddings.features)
        users, items = self._users(tensors), tensors[self.item]
        if isinstance(items, Tensor):
            return users @ self.item_vectors(items).T
        rows, offsets = self.embeddings.sequence(tensors, self.item)
        if not torch.compiler.is_compiling() and bool((offsets.diff() > self.candidates).any()):
            raise ValueError(f"features: a list of {self.item!r} is too long; allowed: candidates={self.candidates}")
        vectors, is_there = padded(rows, offsets, self.candidates)
        return torch.where(is_there, (vectors @ users[:, :, None]).squeeze(2), _NO_CANDIDATE)

    def user_vectors(self, **tensors: Feature) -> Tensor:
        """Returns the vectors of users, (B, dim) float32, for their sequences; zeros for an empty one.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, [self.history])
        return self._users(tensors)

    def item_vectors(self, keys: Tensor) -> Tensor:
        """Returns the vectors of items, (n, dim) float32, for keys (n) int64; a user's score is the inner product."""
        return self.embeddings.rows_of(self.item, keys)

    def states(self, history: Feature) -> tuple[Tensor, Tensor]:
        """Returns the state after each of the newest items of sequences, which predicts the item that follows it.

        Args:
            history: the sequences.

        Returns:
            The states, (B, max_len, dim) float32, the oldest of the items that are read first; and (B, max_len) bool,
            whether there is such an item.
        """
        rows, offsets = self.embeddings.sequence({self.history: history}, self.history)
        x, is_there = padded(rows, offsets, self.max_len, keep_last=True)
        # The newest item always has the last position. Places behind it have none, and no place before sees them.
        places = torch.arange(self.max_len, device=x.device) + (self.max_len - is_there.sum(dim=1))[:, None]
        x = self.dropout(x + self.positions[places.clamp(max=self.max_len - 1)])
        return self.norm(self.blocks(x)), is_there

    def _users(self, tensors: Mapping[str, Feature]) -> Tensor:
        states, is_there = self.states(list_of(self.history, tensors[self.history]))
        lengths = is_there.sum(dim=1)
        last = states[torch.arange(states.shape[0], device=states.device), (lengths - 1).clamp(min=0)]
        return torch.where((lengths > 0)[:, None], last, 0.0)
