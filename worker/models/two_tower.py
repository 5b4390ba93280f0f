"""A two-tower retriever: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations"
(RecSys 2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional

from .feature_checks import check_choice, check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature
from .mlp import mlp


class TwoTower(nn.Module):
    """A model of two MLPs, one that makes a vector of a user and one that makes a vector of an item.

    The score of user x and item y is ``s(x, y) = <u(x), v(y)> / temperature``, with vectors of length 1 (section 3).
    A forward scores each user with each item of the batch. The loss "in_batch_softmax" takes these scores, and corrects
    them by the items' sampling probabilities. For retrieval, the vectors of all items go into an index of nearest
    neighbours: :meth:`user_vectors` and :meth:`item_vectors` compute them, and :meth:`tower` makes a model to publish.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        item: the features of the item; the others are those of the user.
        numbers, shared, pools, init_scale, sparse: as in ``FeatureEmbeddings``. A history of the user can read the
            item's table by ``shared`` and ``pools``.
        dim: the width of an embedding.
        hidden: the hidden widths of both MLPs.
        out: the width of the vectors.
        temperature: the temperature, above 0.
        dropout: the share of units of the MLPs that are dropped while training.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        item: Sequence[str],
        *,
        numbers: Sequence[str] = (),
        shared: Mapping[str, str] | None = None,
        pools: Mapping[str, str] | None = None,
        dim: int = 16,
        hidden: Sequence[int] = (64,),
        out: int = 32,
        temperature: float = 0.05,
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} is not allowed; allowed: > 0")
        self.temperature = temperature
        self.embeddings = FeatureEmbeddings(
            rows, dim, numbers=numbers, shared=shared, pools=pools, init_scale=init_scale, sparse=sparse
        )
        features = self.embeddings.features
        for name in item:
            check_choice("item", name, features)
        self.features = {
            "user": tuple(name for name in features if name not in item),
            "item": tuple(name for name in features if name in item),
        }
        if not all(self.features.values()):
            raise ValueError(f"item={list(item)} is not allowed; allowed: some, but not all, of {', '.join(features)}")
        self.towers = nn.ModuleDict(
            {side: mlp([self.embeddings.width(names), *hidden, out], dropout) for side, names in self.features.items()}
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the features that forward takes; a job checks them before its workers start."""
        return self.embeddings.features

    def forward(self, **tensors: Feature) -> Tensor:
        """Returns the score of each user with each item of the batch, (B, B) float32.

        Args:
            tensors: the features of users and items by name; row b has a user and its own item.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, self.embeddings.features)
        return self._vectors("user", tensors) @ self._vectors("item", tensors).T / self.temperature

    def user_vectors(self, **tensors: Feature) -> Tensor:
        """Returns vectors of length 1 of users, (B, out) float32, from the features of the user by name.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, self.features["user"])
        return self._vectors("user", tensors)

    def item_vectors(self, **tensors: Feature) -> Tensor:
        """Returns vectors of length 1 of items, (B, out) float32, from the features of the item by name.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, self.features["item"])
        return self._vectors("item", tensors)

    def tower(self, side: str) -> nn.Module:
        """Returns one tower as a model of its own, whose forward is :meth:`user_vectors` or :meth:`item_vectors`.

        Args:
            side: "user" or "item".

        Raises:
            ValueError: there is no such side.
        """
        check_choice("side", side, tuple(self.features))
        return _Method(self, f"{side}_vectors")

    def pairs(self, **tensors: Feature) -> dict[str, Tensor]:
        """Returns ``score``, that of the user and the item of each row, (B), and ``user_vector`` and ``item_vector``.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, self.reads)
        users, items = self._vectors("user", tensors), self._vectors("item", tensors)
        return {"score": (users * items).sum(dim=1) / self.temperature, "user_vector": users, "item_vector": items}

    def for_serving(self) -> nn.Module:
        """Returns the model that a job publishes, whose forward is :meth:`pairs`."""
        return _Method(self, "pairs")

    def _vectors(self, side: str, tensors: Mapping[str, Feature]) -> Tensor:
        x = self.embeddings.flat(tensors, self.features[side])
        return functional.normalize(self.towers[side](x), dim=1)


class _Method(nn.Module):
    def __init__(self, model: TwoTower, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method
        self.train(model.training)

    def forward(self, **tensors: Feature) -> Tensor | dict[str, Tensor]:
        return getattr(self.model, self.method)(**tensors)  # type: ignore[no-any-return]
