"""Recommendation models in plain torch; no file here imports anything of this package but its neighbours."""

from .deepfm import DeepFM
from .dlrm import DLRM
from .hashed_embeddings import HashedEmbeddings
from .mlp import Tower, mlp

__all__ = ["DLRM", "DeepFM", "HashedEmbeddings", "Tower", "mlp"]
