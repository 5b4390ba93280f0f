"""The features of a model, as ``sr.features``: their kinds, and what makes tensors of columns with them."""

from ...proto.features.base import HashUnknown as HashUnknown
from ...proto.features.kinds import (
    BucketizedFeature as BucketizedFeature,
    CrossFeature as CrossFeature,
    IdFeature as IdFeature,
    MultiHotFeature as MultiHotFeature,
    NumericFeature as NumericFeature,
    SequenceFeature as SequenceFeature,
    SplitFeature as SplitFeature,
    TimeFeature as TimeFeature,
)
from ..data.feature_tensors import Features as Features
