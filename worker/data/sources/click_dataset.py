"""``ClickDataset``: the readers of job files as a dataset of torch, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from ....proto.config.data_config import DataConfig
from ....proto.errors import FailedPrecondition
from ....proto.features.feature_set import FeatureSet
from ....proto.options.document import validate
from ..batch import Batch
from ..feature_tensors import Features, InNamespace
from ..features import FittedFeatures
from ..named_batch import NamedBatch, NamedPart
from ..reader import ReadOptions
from .open_reader import feature_spec, fit_features, open_reader, plan_files


class ClickDataset(IterableDataset[NamedPart]):
    """Batches of samples from files, with the features computed in native code; each ``iter()`` is one epoch.

    Workers read disjoint samples: each rank has a share of every epoch. Samples, parts of files and files are shuffled
    by the seed and the epoch. ``state_dict`` between two batches is the position of the next one, and
    ``session.save(reader=dataset)`` keeps it. A DataLoader around it needs ``batch_size=None`` and no workers, because
    it reads in threads of its own.

    Args:
        files: paths or URLs of files, or of folders of them, all with the same columns.
        features: the features. Statistics that they lack are learnt of these files, in one pass.
        file_format: "csv", "parquet", "orc", "arrow" or "jsonl".
        columns: what else is read of a sample: ``label``, or ``labels``, and ``group``, ``sample_weight`` or
            ``timestamp``, as in the section ``data.columns`` of a job file (docs/configuration.md); with csv, the
            dialect of the text as well, as in ``data.csv``.
        batch_size: the number of samples in a batch of this rank; the last batch of an epoch may have fewer.
        shuffle_rows: the number of samples that are shuffled together; 0: the order of the files.
        seed: the seed of every order.
        rank: the rank of this worker; None: that of ``torch.distributed`` where it is initialised, else 0.
        world_size: the number of workers; None: that of ``torch.distributed`` where it is initialised, else 1.
        session: the session of this worker, whose namespace keeps the statistics: one worker learns those that are
            missing, and each rank makes the dataset. None: each rank learns its own, of all files.
        where: a filter of rows, as ``data.where`` of a job file; not with csv. None: all rows.
        on_bad_line: "error": a malformed row is an error. "skip": it is skipped and counted in :attr:`bad_lines`.

    Attributes:
        features: the features with their statistics, for a dataset of test files and for ``session.publish``.

    Raises:
        InvalidArgument: an argument is not allowed, or a file lacks a column; the text names it.
        NotFound: there is no such file.
        BadLine: a row that is read for the statistics is malformed, and such rows are not skipped.
        DataLoss, FailedPrecondition: a file cannot be read.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        features: Features,
        *,
        file_format: Literal["csv", "parquet", "orc", "arrow", "jsonl"],
        columns: Mapping[str, Any],
        batch_size: int,
        shuffle_rows: int = 1 << 17,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        session: InNamespace | None = None,
        where: str | None = None,
        on_bad_line: Literal["error", "skip"] = "error",
    ) -> None:
        section = "csv" if file_format == "csv" else "columns"
        paths = [files] if isinstance(files, str) else list(files)
        config = validate(
            DataConfig,
            {
                "format": file_format,
                "train": paths,
                "test": paths,
                section: dict(columns),
                "where": where,
                "on_bad_line": on_bad_line,
                "shuffle_rows": shuffle_rows,
            },
            where="ClickDataset",
        )
        config.read_features(features.set.features)
        is_group = dist.is_available() and dist.is_initialized()
        options = ReadOptions(
            batch_size=batch_size,
            rank=rank if rank is not None else dist.get_rank() if is_group else 0,
            world=world_size if world_size is not None else dist.get_world_size() if is_group else 1,
            shuffle=shuffle_rows > 0,
            shuffle_rows=max(shuffle_rows, 1),
            seed=seed,
        )
        plan, spec = plan_files(config, "train"), feature_spec(config)

        def fitted(known: FeatureSet) -> FeatureSet:
            return known.with_statistics(fit_features(config, plan, known.statistics).statistics)

        made_of = fitted if session is None else partial(session.core.agreed_features, fit=fitted, policy="keep")
        self.features = Features(made_of(features.set))
        numbers = [each.name for each in (*spec.dense, *spec.buckets)]
        known = self.features.set.statistics
        learnt = FittedFeatures(spec, {name: known[name] for name in numbers if name in known})
        names = (*spec.names.dense, *spec.names.sparse, *spec.names.lists)

        def made(batch: Batch) -> NamedBatch:
            return NamedBatch.of(batch, names, max(len(batch), 1))

        self._reader = open_reader(config, "train", learnt, options, plan, made)

    def __iter__(self) -> Iterator[NamedPart]:
        loader = get_worker_info()
        if loader is not None:
            raise FailedPrecondition(
                f"ClickDataset: a DataLoader with {loader.num_workers} workers would read each sample that often; "
                "allowed: num_workers=0, as the dataset reads in threads of its own"
            )
        for batch in self._reader:
            assert isinstance(batch, NamedBatch)
            yield from batch.micro_batches

    @property
    def epoch(self) -> int:
        """The number of epochs completed so far."""
        return self._reader.epoch

    @property
    def bad_lines(self) -> int:
        """The number of malformed rows that this rank has skipped in the current pass, or in the last one."""
        return self._reader.bad_lines

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch and the statistics of the features, as plain numbers and lists."""
        return self._reader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned. On an error nothing changes.

        Raises:
            InvalidArgument: the state is of other files, features or order, or of another rank, number of workers or
                batch size; :meth:`load_state_dicts` accepts the last two.
        """
        self._reader.load_state_dict(state)

    def check_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Checks, without a change, what :meth:`load_state_dicts` would refuse."""
        self._reader.check_state_dicts(states)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues from the states of all workers, with any number of workers now. On an error nothing changes.

        Raises:
            InvalidArgument: a state is of other files, features or order, or one is missing; or the workers were in
                different epochs.
        """
        self._reader.load_state_dicts(states)
