"""A block of a transformer in which a place sees the places before it: Kang & McAuley, "Self-Attentive Sequential
Recommendation" (ICDM 2018).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class CausalBlock(nn.Module):
    """A block of self-attention and a feed-forward network, each as ``x + dropout(g(norm(x)))``.

    Attention is ``softmax(Q K^T / sqrt(width of a head)) V``, in which a place sees itself and the places before it
    (section III-B). The network is ``relu(x W1 + b1) W2 + b2`` at each place. The form with a norm, a dropout and a sum
    is that of section III-C.

    Args:
        dim: the width of a place.
        heads: the number of heads, a divisor of ``dim``.
        dropout: the share of units that are dropped while training.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.attention_norm, self.network_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.network = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the states of places, (B, n, dim), for ``x``, (B, n, dim)."""
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.dropout(self.network(self.network_norm(x)))
        return out
