"""What reading the files of a job once has shown: where their parts lie, and the items to draw negatives from.

A later start of the job takes it for the files that are as they were. A plan of a file that has changed meanwhile is
noticed when its parts are read (``../source.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from ....proto.checkpoint.folder import bytes_of
from ....proto.checkpoint.tensor_file import MOST_HEADER_BYTES, Tensor, check_sum, decode, encode
from ....proto.config.data_config import DataConfig
from ....proto.documents import parse_json
from ....proto.errors import DataLoss
from ....proto.features.base import Feature
from ....proto.features.feature_set import FeatureSet
from ....proto.features.kept import digest_of
from ..candidates import ItemTable
from ..source import PlannedFile
from ..storage import identity_of
from .hive import Partitions

_FORMAT = "1"


@dataclass(frozen=True)
class KnownPlan:
    """The plan of a file.

    Attributes:
        plan: the file with its parts.
        key: how it was read, as :func:`plan_key` gives it.
        identity: what it was like, as :func:`~..storage.identity_of` gives it; "": that is not known.
    """

    plan: PlannedFile
    key: str
    identity: str


@dataclass(frozen=True)
class KnownItems:
    """Items of the training files.

    Attributes:
        table: the items.
        key: what they were made of, as :func:`items_key` gives it.
        files: what the files were like, as :func:`files_key` gives it; "": that is not known.
    """

    table: ItemTable
    key: str
    files: str


@dataclass(frozen=True)
class KnownFiles:
    """The document of a namespace. Its size is bounded by the files and the items of one job.

    Attributes:
        maker: the clock of the job that wrote it; "": it had none.
        plans: the planned files by path.
        items: the items to draw from; None: the job draws from none.
    """

    maker: str = ""
    plans: Mapping[str, KnownPlan] = field(default_factory=dict)
    items: KnownItems | None = None

    def plans_of(self, paths: Iterable[str], key: str, *, maker: str = "") -> dict[str, KnownPlan]:
        """Returns the plans of those files that are as they were, by path.

        Args:
            paths: the paths of the files.
            key: how the files are read.
            maker: the clock of the job; plans that its worker made are returned without a look at the files.
        """
        is_its = maker != "" and maker == self.maker
        found = {path: self.plans[path] for path in paths if path in self.plans}
        return {
            path: known
            for path, known in found.items()
            if known.key == key and (is_its or (known.identity != "" and identity_of(path) == known.identity))
        }

    def items_of(self, key: str, files: str, *, maker: str = "") -> ItemTable | None:
        """Returns the items of the training files; None: they are not known, or of other files.

        Args:
            key: what they are made of.
            files: what the files are like, as :func:`files_key` gives it.
            maker: the clock of the job, whose worker's items are returned without a look at the files.
        """
        items = self.items
        if items is None or items.key != key:
            return None
        is_its = maker != "" and maker == self.maker
        return items.table if is_its or (files != "" and items.files == files) else None

    def written(self) -> bytes:
        """Returns the document as a file of safetensors."""
        plans = list(self.plans.values())
        entries = [
            [known.key, known.identity, known.plan.path, known.plan.is_sequential, *known.plan.places.shape]
            for known in plans
        ]
        tensors = {
            "rows": _numbers(known.plan.rows for known in plans),
            "places": _numbers(known.plan.places.reshape(-1) for known in plans),
        }
        items = self.items
        if items is not None:
            tensors |= {"item_keys": _numbers([items.table.keys]), "item_ends": _numbers([items.table.ends])}
        of_items = None if items is None else [items.key, items.files]
        said = {"maker": self.maker, "plans": entries, "items": of_items}
        encoded = encode(tensors, {"format": _FORMAT, "files": json.dumps(said)})
        return b"".join(bytes_of(piece) for piece in encoded.pieces)


NOTHING_KNOWN = KnownFiles()


def known_of(data: bytes, where: str) -> KnownFiles:
    """Returns what a document says.

    Args:
        data: the bytes of the document.
        where: its place, which begins error texts.

    Raises:
        DataLoss: it is no such document, or one of another format.
    """
    metadata, tensors = decode(memoryview(data), where)
    check_sum(metadata, list(tensors.values()), where)
    try:
        if metadata["format"] != _FORMAT:
            raise ValueError(f"format {metadata['format']}, and this program reads {_FORMAT}")
        said: dict[str, Any] = parse_json(metadata["files"].encode(), where, MOST_HEADER_BYTES)
        rows, places = tensors["rows"].values.astype(np.int64), tensors["places"].values.astype(np.int64)
        plans: dict[str, KnownPlan] = {}
        first_row = first_place = 0
        for key, identity, path, is_sequential, parts, numbers in said["plans"]:
            end_row, end_place = first_row + parts, first_place + parts * numbers
            of_file = places[first_place:end_place].reshape(parts, numbers)
            plan = PlannedFile(path, rows[first_row:end_row].copy(), of_file.copy(), is_sequential)
            plans[path] = KnownPlan(plan, key, identity)
            first_row, first_place = end_row, end_place
        items = None
        if said["items"] is not None:
            keys, ends = tensors["item_keys"].values, tensors["item_ends"].values
            items = KnownItems(ItemTable(keys.astype(np.int64), ends.astype(np.int64)), *said["items"])
        return KnownFiles(said["maker"], plans, items)
    except (KeyError, TypeError, ValueError) as error:
        raise DataLoss(f"{where}: is no document of data files: {type(error).__name__}: {error}") from None


def plan_key(config: DataConfig, paths: Sequence[str]) -> str:
    """Returns a digest of what decides the parts of a file beside the file.

    Args:
        config: the job's data section.
        paths: all files that are read together, whose folders decide the types of the columns of ``data.where``.
    """
    said = config.model_dump(mode="json", include={"format", "csv", "columns", "where"})
    return _digest([said, sorted(Partitions(paths).text_columns) if config.where else []])


def items_key(config: DataConfig, feature: Feature, features: FeatureSet, *, weighted: bool) -> str:
    """Returns a digest of what decides the items of files beside the files and their plans.

    Args:
        config: the job's data section.
        feature: the feature with the key of a sample's item.
        features: the features of the job with their vocabularies.
        weighted: whether the weight of an item is the number of its samples.
    """
    # Samples that any feature refuses count where they are not skipped.
    deciding = features.features if config.on_bad_line == "skip" else (feature,)
    said = [[each.model_dump(mode="json"), digest_of(features, each.name)] for each in deciding]
    return _digest([feature.name, said, weighted, config.on_bad_line])


def files_key(plans: Iterable[KnownPlan]) -> str:
    """Returns a digest of files, in their order, and of how they are read; "" where one's identity is not known."""
    said = [[known.plan.path, known.key, known.identity] for known in plans]
    return _digest(said) if all(known[-1] for known in said) else ""


def _digest(value: Any) -> str:
    return str(xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode()))


def _numbers(parts: Iterable[npt.NDArray[np.int64]]) -> Tensor:
    return Tensor("I64", np.concatenate([np.empty(0, np.int64), *parts]))
