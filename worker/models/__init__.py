"""Recommendation models in plain torch; the files of this folder import nothing else of the package."""

from .autoint import AutoInt
from .dcn import DCN
from .deepfm import DeepFM
from .din import DIN
from .dlrm import DLRM
from .feature_embeddings import FeatureEmbeddings
from .jagged import aligned, padded, sample_of_values, segment_max, segment_softmax, segment_sum
from .mlp import Tower, mlp
from .mmoe import MMoE
from .sasrec import SASRec
from .two_tower import TwoTower
from .wide_deep import WideDeep

__all__ = [
    "DCN",
    "DIN",
    "DLRM",
    "AutoInt",
    "DeepFM",
    "FeatureEmbeddings",
    "MMoE",
    "SASRec",
    "Tower",
    "TwoTower",
    "WideDeep",
    "aligned",
    "mlp",
    "padded",
    "sample_of_values",
    "segment_max",
    "segment_softmax",
    "segment_sum",
]
