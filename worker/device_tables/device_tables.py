"""The tables of one session whose rows are on the devices of the job's ranks, and their part of a step.

    lookup:    ids ── unique keys ──> their ranks ── rows ──> pooling on this rank, backward stages gradients
    step:      sums by key ──> exchange() ──> prepare() ── vote of all ranks ──> apply(), or nothing

Invariants:
 1. A rank's rows change in ``apply`` alone, after the vote, with the gradients of all ranks.
 2. Every rank calls ``exchange`` in each step, whether or not it has gradients.
 3. However a step ends, ``forget`` leaves no gradient and no prepared change.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device.link import link_of, numbers_of
from ...proto.errors import FailedPrecondition, InvalidArgument, SparserowError
from ...proto.schema import TableSchema
from ..session.device_side import SealedRows
from ..session.session_parts import Placement
from .exchange import END_OF_STEP, RankExchange
from .rank_rows import RankRows
from .read_rows import read_rows, read_rows_together
from .row_matrix import Block, RowMatrix, StepOfRows, bytes_of_rows, kind_of
from .share import Share, by_owner
from .staged import KeySums, StagedLookup, sum_tables


@dataclass(frozen=True)
class NewTable:
    """A table that is to be made.

    Attributes:
        schema: its schema, with the id.
        num_rows: the number of rows.
        zeros: the key whose first row is zeros; None: there is none.
    """

    schema: TableSchema
    num_rows: int
    zeros: int | None


class DeviceTables:
    """The tables on devices of one session; ``distribute`` makes it.

    Lookups and steps are called by the thread that trains; backward may run in another one.

    Args:
        native: the session's native half, which counts backwards and numbers steps.
        placement: this worker's rank in its job, and the rules of the job.
        device: the device of the rows.
    """

    def __init__(self, native: _client.NativeSession, placement: Placement, device: torch.device) -> None:
        self.device = device
        self._native, self._placement = native, placement
        self._tables: dict[str, RankRows] = {}  # by name within the namespace
        self._order: dict[str, int] = {}  # the names, matrix by matrix, with the number of each
        self._staged: dict[str, list[StagedLookup]] = {}
        self._matrices: list[RowMatrix] = []
        # By matrix: what this rank's backwards have brought, what all ranks have, with the rate of each table, and the
        # prepared changes.
        self._sealed: list[KeySums] = []
        self._received: list[tuple[list[Block], list[float]]] = []
        self._ready: list[tuple[RowMatrix, StepOfRows]] = []
        self._generation = 0  # of steps, so that a backward after its step is noticed
        self._counts = {"nonfinite_rows": 0, "clipped_rows": 0}
        self.exchanges = RankExchange(
            placement.rank, placement.world_size, device, placement.deadline_sec, self._name_of_call
        )

    @property
    def names(self) -> Sequence[str]:
        """The names of the tables, matrix by matrix, in the same order on every rank."""
        return list(self._order)

    def number_of(self, name: str) -> int:
        """Returns the place of a table among :attr:`names`."""
        return self._order[name]

    @property
    def rows(self) -> int:
        """The number of rows of all tables, on all ranks."""
        return sum(table.share.num_rows for table in self._tables.values())

    def table(self, name: str) -> RankRows:
        """Returns this rank's rows of a table, by its name within the namespace."""
        return self._tables[name]

    def add(self, new: Sequence[NewTable]) -> None:
        """Makes tables, whole. Every rank calls it with the same tables.

        Raises:
            InvalidArgument: a table does not fit on this rank's device; the text has the bytes. Nothing was made.
            FailedPrecondition: the same on another rank.
        """
        made: list[RankRows] = []
        problem: SparserowError | None = None
        try:
            self._check_fit(new)
            made = self._made(new)
        except SparserowError as error:
            problem = error
        except torch.OutOfMemoryError as error:
            problem = InvalidArgument(f"distribute: a table does not fit on {self.device}: {error}")
        self.exchanges.check_all(problem)
        for rows in made:
            self._tables[rows.schema.name] = rows
            _registered[rows.schema.full_name] = self
            if rows.matrix not in self._matrices:
                self._matrices.append(rows.matrix)
        self._order = {name: at for at, name in enumerate(each for matrix in self._matrices for each in matrix.names)}

    def _made(self, new: Sequence[NewTable]) -> list[RankRows]:
        """Returns this rank's rows of new tables, in a matrix for each width and optimizer."""
        rank, world = self._placement.rank, self._placement.world_size
        kinds: dict[tuple[object, ...], list[tuple[NewTable, Share]]] = {}
        for each in new:
            share = Share(each.schema.id, each.num_rows, world)
            kinds.setdefault(kind_of(each.schema), []).append((each, share))
        made: list[RankRows] = []
        for group in kinds.values():
            names, sizes = [each.schema.name for each, _ in group], [share.size(rank) for _, share in group]
            matrix = RowMatrix(group[0][0].schema, names, sizes, self.device)
            made += [RankRows(each.schema, share, rank, matrix, zeros=each.zeros) for each, share in group]
        return made

    def remove(self, names: Sequence[str]) -> None:
        """Removes tables that were added together, and their rows."""
        for name in names:
            _registered.pop(self._tables.pop(name).schema.full_name, None)
        self._matrices = [each for each in self._matrices if not set(each.names) <= {*names}]
        self._order = {name: at for at, name in enumerate(each for matrix in self._matrices for each in matrix.names)}

    def _check_fit(self, new: Sequence[NewTable]) -> None:
        """Compares what the tables need on this rank's device with what is free there."""
        free = link_of(self.device).free_bytes()
        for each in new:
            rows = Share(each.schema.id, each.num_rows, self._placement.world_size).size(self._placement.rank)
            needed = bytes_of_rows(each.schema, rows)
            if needed > free:
                raise InvalidArgument(
                    f"tables[{each.schema.name!r}].placement: 'device' is not allowed, as rank {self._placement.rank} "
                    f"needs {needed} bytes for its {rows} of {each.num_rows} rows and state, and {free} bytes are free "
                    f"on {self.device}; allowed: a table within these bytes, more ranks, or placement 'servers'"
                )
            free -= needed

    def read(self, name: str, keys: Tensor) -> Tensor:
        """Returns rows of all ranks. Every rank calls it, in the same order of tables, also without a key.

        Args:
            name: the name of the table.
            keys: the keys, (n) int64 on the device, unique.

        Returns:
            (n, dim) float32 on the device.

        Raises:
            SparserowError: see :meth:`RankExchange.integers`.
        """
        return read_rows(self.exchanges, self._tables[name], self._order[name], keys)

    def rows_at(self, name: str, rows: Tensor) -> Tensor:
        """Returns rows of this rank's matrix that has a table, (n, dim) float32."""
        return self._tables[name].matrix.weights.index_select(0, rows)

    def place_of(self, name: str) -> tuple[RowMatrix, int]:
        """Returns the matrix that has a table, and the table's place in it."""
        rows = self._tables[name]
        return rows.matrix, rows.place

    @property
    def is_alone(self) -> bool:
        """Whether this rank has all rows."""
        return self._placement.world_size == 1

    def read_together(self, wanted: Sequence[tuple[str, Tensor]], digest: int) -> list[Tensor] | None:
        """Returns what :meth:`read` does for several lookups, by one exchange.

        Args:
            wanted: the name of the table and the keys of each lookup; the tables are the same on every rank.
            digest: a number above 0 that ranks share whose lookups are alike.

        Returns:
            The rows of each lookup; None on every rank where one does not make these lookups now.

        Raises:
            SparserowError: see :meth:`RankExchange.integers`.
        """
        return read_rows_together(self.exchanges, [(self._tables[name], keys) for name, keys in wanted], digest)

    @property
    def generation(self) -> int:
        """A number that changes when a step ends."""
        return self._generation

    def check_usable(self) -> None:
        """Raises FailedPrecondition when the session is closed, or lookups are refused until its step ends."""
        self._native.check_usable()
        if self._native.lookup_refusal:
            raise FailedPrecondition(self._native.lookup_refusal)

    def check_generation(self, name: str, generation: int) -> None:
        """Raises FailedPrecondition where a lookup of a table was made in another step than this one."""
        if self._generation != generation:
            raise FailedPrecondition(
                f"table {name!r}: gradient for ids that were not looked up in this step: call backward before "
                "session.step"
            )

    def stage(self, name: str, staged: StagedLookup) -> None:
        """Keeps what a backward has brought until the step ends."""
        self._staged.setdefault(name, []).append(staged)
        self._native.count_staged()

    def seal(self, scale: float, clip_row_norm: float) -> Sequence[Tensor]:
        """Ends the gathering of gradients; see :class:`DeviceSide`."""
        given = [
            sum_tables([self._staged.get(name, ()) for name in matrix.names], matrix.dim, self.device)
            for matrix in self._matrices
        ]
        self._sealed = [each.sealed(scale, clip_row_norm) for each in given]
        return [number for sums in self._sealed for number in sums.numbers]

    def judge(self, numbers: Sequence[float]) -> SealedRows:
        """Looks for sums that are not finite; see :class:`DeviceSide`."""
        report, values = SealedRows(), iter(numbers)
        self._sealed = [sums.judged([next(values) for _ in sums.numbers]) for sums in self._sealed]
        for matrix, sums in zip(self._matrices, self._sealed, strict=True):
            self._counts["nonfinite_rows"] += sums.nonfinite_rows
            self._counts["clipped_rows"] += sums.clipped_rows
            if sums.nonfinite_rows:
                table, key = report.table, report.key
                if not report.rows:
                    name = matrix.names[sums.table_at(sums.nonfinite_place)]
                    table, key = self._tables[name].schema.full_name, int(sums.keys[sums.nonfinite_place])
                report = SealedRows(report.rows + sums.nonfinite_rows, table, key)
        return report

    def exchange(self, rates: Mapping[str, float]) -> None:
        """Sends the sums to the ranks that have their rows; see :class:`DeviceSide`.

        A rank gets one message of integers from each rank, (number of rows, bits of the learning rate) of each table
        and then the numbers of all rows, and one of their gradients, table by table.
        """
        if not self._order:
            return
        if self.is_alone:
            for matrix, sums in zip(self._matrices, self._sealed, strict=True):
                # With one rank the row of a key within its table is the key.
                rows = matrix.rows_of(sums.keys.split(list(sums.sizes))) if sums.rows is None else sums.rows
                # Rounded as in a message, because a step is the same with any number of ranks.
                of_tables = [_rate_of(_bits_of(rates[name])) for name in matrix.names]
                self._received.append(([Block(rows, sums.grads, sums.sizes)], of_tables))
            return
        integers, floats = self._messages(rates)
        received = self.exchanges.integers(END_OF_STEP, integers)
        dims = [self._tables[name].schema.dim for name in self._order]
        heads = numbers_of(torch.stack([each[: 2 * len(dims)] for each in received]))
        sizes = [sum(n * dim for n, dim in zip(head[::2], dims, strict=True)) for head in heads]
        grads = self.exchanges.floats(floats, sizes)
        # As on a shard, the rate is that of the lowest rank that has a gradient here.
        lowest = [next((rank for rank, head in enumerate(heads) if head[2 * at]), 0) for at in range(len(dims))]
        of_rates = [_rate_of(heads[rank][2 * at + 1]) for at, rank in enumerate(lowest)]
        of_ranks = [
            self._blocks_of(rows[2 * len(dims) :], values, head[::2])
            for rows, values, head in zip(received, grads, heads, strict=True)
        ]
        for at, matrix in enumerate(self._matrices):
            first = self._order[matrix.names[0]]
            self._received.append(([of_rank[at] for of_rank in of_ranks], of_rates[first : first + len(matrix.names)]))

    def _blocks_of(self, rows: Tensor, grads: Tensor, counts: Sequence[int]) -> list[Block]:
        """Returns the block of each matrix from one rank's message, whose rows and gradients follow table by table."""
        blocks, row, at, table = [], 0, 0, 0
        for matrix in self._matrices:
            sizes = list(counts[table : table + len(matrix.names)])
            total = sum(sizes)
            mine = matrix.rows_of(rows[row : row + total].split(sizes))
            blocks.append(Block(mine, grads[at : at + total * matrix.dim].view(-1, matrix.dim), sizes))
            row, at, table = row + total, at + total * matrix.dim, table + len(matrix.names)
        return blocks

    def _messages(self, rates: Mapping[str, float]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns what each rank gets from this one: the integers and the gradients."""
        world = self._placement.world_size
        heads: list[list[int]] = [[] for _ in range(world)]
        rows: list[list[Tensor]] = [[] for _ in range(world)]
        floats: list[list[Tensor]] = [[] for _ in range(world)]
        keys = [part for sums in self._sealed for part in sums.keys.split(list(sums.sizes))]
        grads = [part for sums in self._sealed for part in sums.grads.split(list(sums.sizes))]
        shares = [self._tables[name].share for name in self._order]
        divided = by_owner(list(zip(shares, keys, strict=True)))
        for name, share, values, parts, order in zip(self._order, shares, grads, *divided, strict=True):
            of_ranks = values.index_select(0, order).split([len(part) for part in parts])
            for rank, (part, its) in enumerate(zip(parts, of_ranks, strict=True)):
                heads[rank] += [len(part), _bits_of(rates[name])]
                rows[rank].append(share.rows(part))
                floats[rank].append(its.reshape(-1))
        integers = [
            torch.cat([torch.tensor(head).to(self.device), *mine]) for head, mine in zip(heads, rows, strict=True)
        ]
        return integers, [torch.cat(parts) for parts in floats]

    def prepare(self) -> None:
        """Computes what the step changes, where that takes memory; see :class:`DeviceSide`."""
        for matrix, (blocks, rates) in zip(self._matrices, self._received, strict=True):
            of_rates: dict[float, list[int]] = {}
            for table, rate in enumerate(rates):
                of_rates.setdefault(rate, []).append(table)
            try:
                for lr, tables in of_rates.items():
                    mine = blocks if len(of_rates) == 1 else [each.of_tables(tables) for each in blocks]
                    self._ready.append((matrix, matrix.step(mine, grad_sum=self._sums, lr=lr)))
            except torch.OutOfMemoryError as error:
                more = f" and {len(matrix.names) - 1} more of its width" if len(matrix.names) > 1 else ""
                raise FailedPrecondition(
                    f"table {matrix.names[0]!r}{more}: the memory of {self.device} was not enough to end the step, and "
                    f"nothing was applied; allowed: a smaller batch, more ranks, or placement 'servers': {error}"
                ) from error

    def apply(self) -> None:
        """Applies what was prepared; see :class:`DeviceSide`."""
        for matrix, step in self._ready:
            matrix.apply(step, grad_sum=self._sums)

    def forget(self) -> None:
        """Ends the step: its gradients and what was prepared are dropped."""
        self._generation += 1
        self._staged, self._sealed, self._received, self._ready = {}, [], [], []

    def drop_gradients(self) -> None:
        """Forgets the gradients that backward has brought."""
        self._staged = {}

    def stats(self) -> Mapping[str, int]:
        """Returns the counters of :class:`SessionStats` to which these tables add."""
        tables = self._tables.values()
        return {**self._counts, "device_tables": len(tables), "device_table_bytes": sum(each.bytes for each in tables)}

    def close(self) -> None:
        """Unregisters the tables and gives the process group back."""
        for rows in self._tables.values():
            if _registered.get(rows.schema.full_name) is self:
                del _registered[rows.schema.full_name]
        self.exchanges.close()

    @property
    def _sums(self) -> bool:
        return self._placement.grad_scale == "sum"

    def _name_of_call(self, call: int) -> str:
        if call == END_OF_STEP:
            return "session.step"
        if call < END_OF_STEP:
            return "the lookups of a forward"
        return f"a lookup of table {self.names[call]!r}" if 0 <= call < len(self._order) else "another call"


_registered: weakref.WeakValueDictionary[str, DeviceTables] = weakref.WeakValueDictionary()


def tables_of(binding: str) -> DeviceTables:
    """Returns the tables of the session that has made a table, by the table's full name.

    Raises:
        FailedPrecondition: no session of this process has made it.
    """
    found = _registered.get(binding)
    if found is None:
        raise FailedPrecondition(
            f"table {binding!r} is on the devices of a job's ranks, and no open session of this process has it; "
            "connect and distribute the model in this process"
        )
    return found


def whole_rows(tables: DeviceTables, name: str) -> Tensor | None:
    """Returns all rows of a table on rank 0, (num_rows, dim) float32 on the host, else None. Every rank calls it."""
    table = tables.table(name)
    share = table.share
    parts = tables.exchanges.collected(table.weights, [share.size(rank) for rank in range(share.world)])
    if parts is None:
        return None
    whole = torch.empty(share.num_rows, table.schema.dim)
    for rank, part in enumerate(parts):
        whole[share.keys_of(rank)] = part
    return whole


def spread_rows(tables: DeviceTables, name: str, chunks: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Sets all rows of a table to those of rank 0. Every rank calls it, with chunks of the same keys.

    Args:
        tables: the tables of the session.
        name: the name of the table.
        chunks: keys, (n) int64, and their rows, (n, dim) float32; the rows count on rank 0 alone.
    """
    for keys, rows in chunks:
        on_device = rows.to(tables.device, copy=True)
        tables.exchanges.spread(on_device)
        tables.table(name).set_weights(keys, on_device.cpu())


def _bits_of(rate: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", rate))[0])


def _rate_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
