"""Recommendation models in plain torch; the files of this folder import nothing else of the package."""

from .deepfm import DeepFM
from .dlrm import DLRM
from .hashed_embeddings import HashedEmbeddings
from .mlp import Tower, mlp

__all__ = ["DLRM", "DeepFM", "HashedEmbeddings", "Tower", "mlp"]
