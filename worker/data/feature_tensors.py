"""``Features``: features of a model in Python, from columns to the tensors that its ``forward`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.torch_arrays import tensor_of
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.urls import parent_of
from ...proto.errors import InvalidArgument, NotFound
from ...proto.features.base import Feature
from ...proto.features.cells import Columns
from ...proto.features.compute import Array
from ...proto.features.feature_set import FeatureSet
from ...proto.features.jagged import Jagged
from ...proto.features.kept import FeaturesPolicy
from ...proto.features.vocabulary import MOST_BYTES

Tensors: TypeAlias = "dict[str, Tensor | tuple[Tensor, ...]]"


class _Keeper(Protocol):
    def agreed_features(
        self, features: FeatureSet, fit: Callable[[FeatureSet], FeatureSet], *, policy: FeaturesPolicy
    ) -> FeatureSet: ...


class InNamespace(Protocol):
    """A session, which a room above this one makes."""

    @property
    def core(self) -> _Keeper: ...


class Features:
    """The features of a model, as a function from columns to tensors by name.

    A published version holds them (``publish(features=)``), so that serving computes the same values.

    Args:
        features: the features: any of ``IdFeature``, ``NumericFeature``, ``BucketizedFeature``, ``CrossFeature``,
            ``MultiHotFeature``, ``SequenceFeature``, ``SplitFeature`` and ``TimeFeature`` of ``sr.features``.

    Attributes:
        set: the features without torch, with what was learnt of the training data.

    Raises:
        InvalidArgument: two features have one name, or a vocabulary is not one.
        NotFound: the file of a vocabulary does not exist.
    """

    def __init__(self, features: Sequence[Feature] | FeatureSet) -> None:
        self.set = (
            features
            if isinstance(features, FeatureSet)
            else FeatureSet.of(features, read_vocabulary, _client.text_keys)
        )

    def fit(
        self,
        training: Iterable[Columns],
        *,
        session: InNamespace | None = None,
        features_policy: FeaturesPolicy = "keep",
    ) -> Features:
        """Returns the features with the statistics of the training data: means, ranges, quantiles.

        With a session the statistics are those of the namespace's rows, and every worker of the job makes the call.
        Statistics that an earlier run has kept in the namespace are used. One worker learns those that are missing, and
        keeps them there with the digests of vocabularies. Checkpoints of the namespace have all of it.

        Args:
            training: the data, as tables, record batches or mappings, which are read once. They are not read when no
                feature lacks statistics.
            session: the session of this worker; None: nothing is kept, and a later run learns its own.
            features_policy: "keep": features that differ from those of an earlier run are refused. "refit": they take
                their place, and rows that were trained before mean something else.

        Raises:
            InvalidArgument: a column is missing or does not fit, and the text names it; or ``features_policy`` has no
                effect without ``session``.
            FailedPrecondition: a feature differs from that which the namespace keeps; the text names it.
            DeadlineExceeded: the worker that learns the statistics gave no sign of life.
        """
        if session is None:
            if features_policy != "keep":
                raise InvalidArgument("features_policy: has no effect without session; remove it")
            return Features(self.set.fit(training))

        def fitted(features: FeatureSet) -> FeatureSet:
            return features.fit(training)

        return Features(session.core.agreed_features(self.set, fitted, policy=features_policy))

    @property
    def pools(self) -> dict[str, str]:
        """How lists are pooled, by the name of each feature that says so: the argument ``pools`` of a model."""
        return self.set.pools

    def keys_of(self, name: str) -> int | None:
        """Returns how many keys a feature can give, from 0; None: they have 63 bits, or it gives numbers."""
        return self.set.keys_of(name)

    def __call__(self, columns: Columns) -> Tensors:
        """Returns the tensors of rows by the names of the features, in their order.

        Args:
            columns: an Arrow table, a record batch, or a mapping from names to sequences. Columns that no feature
                reads are not looked at.

        Returns:
            For each feature a tensor (n), float32 of numbers and int64 of keys; for lists a tuple of values (m) int64
            and offsets (n + 1) int64, and weights (m) float32 where the feature has some. ``nn.EmbeddingBag`` with
            ``include_last_offset=True`` takes them.

        Raises:
            InvalidArgument: a column is missing or does not fit; the text names it.
            FailedPrecondition: a feature lacks statistics.
        """
        return {name: _tensors(array) for name, array in self.set(columns).items()}


def _tensors(array: Array) -> Tensor | tuple[Tensor, ...]:
    if isinstance(array, Jagged):
        return tuple(tensor_of(part) for part in array.parts)
    return tensor_of(array)


def read_vocabulary(path: str) -> bytes:
    """Returns the bytes of a vocabulary's file.

    Args:
        path: its path or URL.

    Raises:
        NotFound: the file does not exist.
    """
    parent, name = parent_of(path)
    folder = Folder(parent)
    if not folder.exists(name):
        raise NotFound(f"vocabulary {path}: the file does not exist")
    return bytes(folder.read_small(name, MOST_BYTES))
