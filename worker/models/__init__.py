"""Recommendation models in plain torch; the files of this folder import nothing else of the package."""

from .deepfm import DeepFM
from .din import DIN
from .dlrm import DLRM
from .feature_embeddings import FeatureEmbeddings
from .hashed_embeddings import HashedEmbeddings
from .mlp import Tower, mlp

__all__ = ["DIN", "DLRM", "DeepFM", "FeatureEmbeddings", "HashedEmbeddings", "Tower", "mlp"]
