"""The tables of a job: the layers that read each, its options, and the rows of those that are frozen."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.distributed as dist
from torch import nn

from ...proto.config.job import JobConfig
from ...proto.config.placement_rules import refusal_of_devices
from ...proto.config.table_config import TableConfig
from ...proto.errors import FailedPrecondition, InvalidArgument, SparserowError
from ...proto.optim import RowOptimizer, starts_at_zero
from ...proto.process.lone_work import lone_work
from ...proto.schema import Constant, Init, Table
from ..api.session import Session
from ..data.sources.feature_columns import feature_set
from ..layers.distribute import layers_of_tables
from ..session.rank_beats import meet
from .model_class import check_key_counts


@dataclass(frozen=True)
class OpenTable:
    """A table whose placement is to be chosen.

    Attributes:
        path: the path of its layer, which is the name of the table.
        rows: the number of rows.
        dim: the number of columns.
        optimizer: the optimizer of its rows.
        dtype: the dtype of its rows.
    """

    path: str
    rows: int
    dim: int
    optimizer: RowOptimizer
    dtype: str


# Returns the paths of those tables that are to be on devices; every worker calls it and gets the same.
ChoosePlacements: TypeAlias = Callable[[Sequence[OpenTable]], Collection[str]]


class JobTables:
    """The tables of a job. Those that the job does not train are frozen in the model at once.

    Args:
        job: the job.
        model: the model before its layers are distributed.

    Attributes:
        bind: the paths of the layers that share a table, by the name of the table.

    Raises:
        InvalidArgument: the model has no layer to distribute, or a feature names a table that does not have its keys.
    """

    def __init__(self, job: JobConfig, model: nn.Module) -> None:
        self._job = job
        self.bind: Mapping[str, Sequence[str]] = job.model.tables
        layers = layers_of_tables(model, job.model.min_rows, self.bind)
        if not layers:
            raise InvalidArgument(
                f"model.min_rows: {job.model.min_rows} leaves no embedding layer to the servers; lower it, or train "
                "with model.backend local"
            )
        # The layers themselves are not kept, as their weights are stale once they are distributed.
        firsts = {table.name: table.layers[0].layer for table in layers}
        self._tables = [self._open(name, each.num_embeddings, each.embedding_dim) for name, each in firsts.items()]
        check_key_counts(feature_set(job.data.features), {table.path: table.rows for table in self._tables})
        for table in layers:
            config = self._config_of(table.name)
            if config is not None and config.frozen:
                for placed in table.layers:
                    placed.layer.weight.requires_grad_(False)

    def _open(self, name: str, rows: int, dim: int) -> OpenTable:
        config = self._config_of(name)
        optimizer = self._job.train.row_optimizer_of(config).row_optimizer()
        return OpenTable(name, rows, dim, optimizer, "float32" if config is None else config.dtype)

    def _config_of(self, table: str) -> TableConfig | None:
        """Returns the section of a table; None when no key of ``tables`` matches its name."""
        configs = self._job.tables.items()
        return next((each for name, each in configs if fnmatch.fnmatchcase(table, name)), None)

    def fill_frozen(self, session: Session) -> None:
        """Fills frozen tables with the rows of their files, on the first worker; the others wait.

        Args:
            session: the session over which the model was distributed.

        Raises:
            NotFound, InvalidArgument, DataLoss, FailedPrecondition: see
                :func:`~sparserow.worker.row_files.keyed_rows.import_table`; raised on every worker.
        """
        failure: SparserowError | None = None
        wanted = [(table.path, self._config_of(table.path)) for table in self._tables]
        files = {name: config.weights for name, config in wanted if config is not None and config.weights is not None}
        if not files:
            return
        if session.rank == 0:
            try:
                with lone_work.doing("rows of frozen tables"):
                    for name, url in files.items():
                        session.table(name).load(url, progress=lambda rows: lone_work.progress(f"{rows:,} rows"))
            except SparserowError as error:
                failure = error
        if session.core.is_distributed:
            outcome = [None if failure is None else str(failure)]
            meet("rows of frozen tables")
            dist.broadcast_object_list(outcome, src=0)
            if failure is None and outcome[0] is not None:
                failure = FailedPrecondition(f"tables: a frozen table could not be filled on rank 0: {outcome[0]}")
        if failure is not None:
            raise failure

    def options(self, choose: ChoosePlacements | None) -> dict[str, Table]:
        """Returns the options of the job's tables by pattern; tables whose placement was chosen come first.

        Args:
            choose: chooses the placement of tables with placement auto; None: they are on the servers.
        """
        job, seed = self._job, self._job.train.seed
        given = {
            name: (table.placement, table.options(self._initial(table), seed)) for name, table in job.tables.items()
        }
        chosen: dict[str, Table] = {}
        undecided: dict[str, OpenTable] = {}
        for table in self._tables:
            pattern = next((each for each in given if fnmatch.fnmatchcase(table.path, each)), None)
            if pattern is None or given[pattern][0] != "auto":
                continue
            if refusal_of_devices(job, job.tables[pattern]) is None:
                undecided[table.path] = table
                chosen[glob.escape(table.path)] = given[pattern][1]
        if undecided and choose is not None:
            for path in choose(list(undecided.values())):
                chosen[glob.escape(path)] = replace(chosen[glob.escape(path)], placement="device")
        return {
            **chosen,
            **{
                pattern: replace(table, placement="device" if placement == "device" else "servers")
                for pattern, (placement, table) in given.items()
                if pattern not in chosen  # a key that is the name of a table
            },
            **({"*": Table(init=self._initial(None), seed=seed)} if self._has_other_tables(given) else {}),
        }

    def _initial(self, table: TableConfig | None) -> Init | None:
        """Returns the initial rows of a table whose section gives none; None means those of the model's layer.

        A model of this package begins with zeros where the optimizer moves rows to 0, unless the job gives a scale.
        """
        model = self._job.model
        optimizer = self._job.train.row_optimizer_of(table).row_optimizer()
        is_plain = ":" not in model.class_ and "init_scale" not in model.args
        return Constant() if is_plain and starts_at_zero(optimizer) else None

    def _has_other_tables(self, patterns: Iterable[str]) -> bool:
        names = [table.path for table in self._tables]
        return any(not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names)
