"""Rows that a device keeps from one call of a served model to the next, each for a time after it was asked for.

    find: probe on the device -> gather what is there -> one copy says what lacks -> that is pulled, sent and kept

Invariants:
 1. A row is used for ``ttl_ms`` after a call asked for it, so it is at most that much older than the served one.
 2. What a call takes from a store is queued on the device before any later call puts rows there.
 3. A call whose rows are all there has one copy to the host, of a byte an id, and none to the device.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _client
from .device.byte_layout import ByteLayout, view_of
from .device.link import DeviceLink
from .device.lookup_math import joined
from .device.row_directory import BYTES_OF_PLACE, WAYS, RowDirectory
from .device_pack import described

if TYPE_CHECKING:
    from .device_groups import LookupOptions

KEPT_LAYOUTS = 8  # layouts of calls whose numbers stay on the device
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class CacheSize:
    """The options of a :class:`DeviceCache`.

    Attributes:
        bytes: of the rows of all tables and the directory, on the device.
        ttl_ms: how long a row is used after it was asked for, in milliseconds; >= 1.
    """

    bytes: int
    ttl_ms: int


class DeviceCache:
    """The rows of one version of a served model that its device keeps. Thread-safe.

    Args:
        tables: the columns of each binding's rows.
        size: of the rows that are kept.
        link: to the device.

    Attributes:
        tables: as given.

    Raises:
        ValueError: the bytes are too few for these tables, or more than what is free on the device.
    """

    def __init__(self, tables: Mapping[str, int], size: CacheSize, link: DeviceLink) -> None:
        least = WAYS * sum(dim * _FLOAT_BYTES + BYTES_OF_PLACE for dim in tables.values())
        most = link.free_bytes()
        if not least <= size.bytes <= most:
            raise ValueError(
                f"cache.capacity_bytes: {size.bytes} is not allowed; allowed: {least} to {most}, one "
                f"set of rows for each of {len(tables)} tables, and what is free on {link.device}"
            )
        self.tables = dict(tables)
        self._link, self._ttl_ms = link, size.ttl_ms
        self._lock = threading.Lock()
        self._last: Any = None  # what the device has to have done before the next call
        sets = size.bytes // least
        self._widths: dict[int, _Width] = {}
        for dim in sorted(set(tables.values())):
            names = [name for name, its in tables.items() if its == dim]
            self._widths[dim] = _Width(dim, names, sets, link.device)
        self._asked, self._missed = 0, 0
        self._ages = torch.zeros((), dtype=torch.int64, device=link.device)

    def stats(self) -> dict[str, int]:
        """``hits`` and ``misses``, in ids of lookups, and ``hit_age_ms``, summed over hits; waits for the device."""
        with self._lock:
            ages, asked, missed = self._ages.clone(), self._asked, self._missed
        age = int(self._link.wait(self._link.fetch(ages)))
        return {"hits": asked - missed, "misses": missed, "hit_age_ms": age}

    def forget(self) -> None:
        """Begins anew for another version of the same tables, whose rows are others; no call is under way."""
        with self._lock:
            self._link.after(self._last)
            for width in self._widths.values():
                width.directory.forget()
            self._ages.zero_()
            self._asked = self._missed = 0
            self._last = self._link.mark()

    def find(self, names: Sequence[str], ids: Sequence[Tensor], options: Sequence[LookupOptions]) -> list[CachedPart]:
        """The rows of each lookup; those that the device lacks are pulled and sent in one copy.

        Args:
            names: the binding of each lookup.
            ids: of each lookup, of any shape, int64 or int32.
            options: how the ids of each are pooled.

        Raises:
            SparserowError: rows cannot be pulled; nothing was kept.
            ValueError: an id has another dtype.
        """
        for each in ids:
            if each.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"InvalidArgument: ids.dtype: '{each.dtype}' is not allowed; allowed: int64, int32")
        device = self._link.device
        # The columns of a matrix stay views, because they are joined by one operation.
        flat = [(each if each.dim() == 1 else each.reshape(-1)).to(device, torch.int64) for each in ids]
        numbers: dict[int, list[int]] = {}
        for i, lookup in enumerate(options):
            numbers.setdefault(lookup.dim, []).append(i)
        now = int(time.monotonic() * 1000)
        with self._lock:
            self._link.after(self._last)
            runs = [
                _Run(self._widths[dim], [names[i] for i in mine], [flat[i] for i in mine], [options[i] for i in mine])
                for dim, mine in numbers.items()
            ]
            for run in runs:
                self._ages.add_(run.probe(now, self._ttl_ms))
            self._last = self._link.mark()
        is_found = self._link.wait(self._link.fetch(joined([run.is_found for run in runs]))).numpy()
        lacking = np.flatnonzero(~is_found)
        with self._lock:
            self._asked += len(is_found)
            self._missed += len(lacking)
        if len(lacking):
            self._bring(runs, lacking, now)
        parts: dict[int, CachedPart] = {}
        for number, (run, mine) in enumerate(zip(runs, numbers.values(), strict=True)):
            rows = CachedRows(number, run)
            parts.update((i, CachedPart(rows, part)) for part, i in enumerate(mine))
        return [parts[i] for i in range(len(ids))]

    def _bring(self, runs: Sequence[_Run], lacking: NDArray[np.int64], now: int) -> None:
        """Pulls rows, sends them in one copy, puts them into the calls' rows and into the stores."""
        keys = self._link.wait(self._link.fetch(joined([run.keys for run in runs]))).numpy()
        wanted: list[_Wanted] = []
        begin = 0
        for run in runs:
            here = lacking[(lacking >= begin) & (lacking < begin + run.size)] - begin
            if len(here):
                wanted.append(_Wanted.of(run, here, keys[begin : begin + run.size]))
            begin += run.size
        hosts = [(name, torch.from_numpy(unique)) for each in wanted for name, unique in each.unique]
        native = _client.LookupPack([(name, described(ids)) for name, ids in hosts], train=False, with_gradient=False)
        # The pack's runs are of the widths that lack rows, in their order, and a run's rows those of its tables.
        with self._lock:
            self._link.after(self._last)
            layout = ByteLayout()
            layout.reserve(native.bytes)
            lists = [each.lists(now) for each in wanted]
            tensors = [torch.from_numpy(each) for each in (values for many in lists for values in many)]
            for tensor in tensors:
                layout.add(tensor)
            host = self._link.host_buffer(layout.size)
            native.write(host.data_ptr())
            layout.write(tensors, host)
            buffer = self._link.receive(self._link.send(host))
            there = iter(layout.views(buffer))
            for each, (n, dim, first) in zip(wanted, native.runs, strict=True):
                rows = view_of(buffer, first, torch.float32, (n, dim))
                lacks, sources, kept, kept_keys, places = itertools.islice(there, 5)
                each.run.rows.index_copy_(0, lacks, rows.index_select(0, sources))
                width = each.run.width
                width.directory.write(width.store, rows.index_select(0, kept), kept_keys, places, now)
            self._last = self._link.mark()


class _Width:
    """The store and the directory of the tables of one width."""

    def __init__(self, dim: int, names: Sequence[str], sets: int, device: torch.device) -> None:
        self.dim = dim
        self.tables = {name: number for number, name in enumerate(names)}
        self.directory = RowDirectory(len(names), sets, device)
        self.store = torch.empty(self.directory.places, dim, device=device)
        self._layouts: dict[tuple[tuple[str, int, int], ...], _Layout] = {}

    def layout(self, of_lookups: tuple[tuple[str, int, int], ...]) -> _Layout:
        """The layout of lookups: (table, ids, padding id of bags or -1) of each; the last few stay on the device."""
        layout = self._layouts.get(of_lookups)
        if layout is None:
            layout = _Layout.make(of_lookups, self)
            while len(self._layouts) >= KEPT_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)), None)
            self._layouts[of_lookups] = layout
        return layout


@dataclass(frozen=True)
class _Layout:
    """What does not change from one call to the next.

    Attributes:
        first_sets: (n) int64 on the device.
        positions: (n) int32 on the device: 0, 1, 2, ...
        paddings: (n) int64 on the device: the id that its bag leaves out, or -1; None: no lookup leaves any out.
        parts: (3, lookups) int32 on the device, as :meth:`RowsOfLookups.layout` gives it; padding ids are at n.
    """

    first_sets: Tensor
    positions: Tensor
    paddings: Tensor | None
    parts: Tensor

    @staticmethod
    def make(of_lookups: tuple[tuple[str, int, int], ...], width: _Width) -> _Layout:
        counts = torch.tensor([n for _, n, _ in of_lookups])
        sets = torch.tensor([width.directory.first_set(width.tables[name]) for name, _, _ in of_lookups])
        paddings = torch.tensor([padding for _, _, padding in of_lookups])
        n = int(counts.sum())
        parts = torch.stack([counts.cumsum(0) - counts, counts, torch.where(paddings < 0, -1, n)]).to(torch.int32)
        device = width.store.device
        of_ids = torch.repeat_interleave(paddings, counts).to(device) if bool((paddings >= 0).any()) else None
        return _Layout(
            torch.repeat_interleave(sets, counts).to(device),
            torch.arange(n, dtype=torch.int32).to(device),
            of_ids,
            parts.to(device),
        )


class _Run:
    """The lookups of one width in one call."""

    def __init__(
        self, width: _Width, names: Sequence[str], ids: Sequence[Tensor], options: Sequence[LookupOptions]
    ) -> None:
        self.width, self.names, self.sizes = width, list(names), [each.numel() for each in ids]
        self.paddings = [-1 if each.mode < 0 else each.padding for each in options]
        self.layout = width.layout(tuple(zip(names, self.sizes, self.paddings, strict=True)))
        self.keys = joined(list(ids))
        self.size = sum(self.sizes)

    def probe(self, now: int, ttl_ms: int) -> Tensor:
        """Takes the rows that are there; the sum of their ages in milliseconds, () int64."""
        width = self.width
        places, self.is_found, ages = width.directory.probe(self.keys, self.layout.first_sets, now, ttl_ms)
        self.rows = width.store.index_select(0, places)
        return ages

    def with_padding(self) -> tuple[Tensor, Tensor]:
        """The rows, and the position of each id among them; a padding id is behind all rows."""
        if self.layout.paddings is None:
            return self.rows, self.layout.positions
        is_padding = self.keys == self.layout.paddings
        rows = torch.cat([self.rows, self.rows.new_zeros(1, self.width.dim)])
        return rows, torch.where(is_padding, self.size, self.layout.positions)


@dataclass(frozen=True)
class _Wanted:
    """The rows that one run lacks.

    Attributes:
        run: the run.
        lacking: (m) the positions of the ids that lack, by table.
        sources: (m) the row of each among the unique ones of all tables.
        unique: the table and the unique keys of each table that lacks some.
    """

    run: _Run
    lacking: NDArray[np.int64]
    sources: NDArray[np.int64]
    unique: list[tuple[str, NDArray[np.int64]]]

    @staticmethod
    def of(run: _Run, lacking: NDArray[np.int64], keys: NDArray[np.int64]) -> _Wanted:
        ends = np.cumsum(run.sizes)
        lookups = np.searchsorted(ends, lacking, side="right")
        table_of = np.array([run.width.tables[name] for name in run.names])[lookups]
        order = np.argsort(table_of, kind="stable")
        lacking, table_of = lacking[order], table_of[order]
        names = list(run.width.tables)
        sources, unique, first = np.empty(len(lacking), np.int64), [], 0
        for table in np.unique(table_of):
            here = table_of == table
            found, inverse = np.unique(keys[lacking[here]], return_inverse=True)
            sources[here] = first + inverse
            unique.append((names[table], found))
            first += len(found)
        return _Wanted(run, lacking, sources, unique)

    def lists(self, asked_ms: int) -> tuple[NDArray[np.int64], ...]:
        """Where rows go: lacking, sources; and of those that are kept from now on: row, key and place."""
        directory = self.run.width.directory
        places = [
            directory.put(keys, directory.first_set(self.run.width.tables[name]), asked_ms)
            for name, keys in self.unique
        ]
        empty = np.empty(0, np.int64)
        at = np.concatenate([empty, *places])
        kept = np.flatnonzero(at >= 0)
        keys = np.concatenate([empty, *(keys for _, keys in self.unique)])
        return self.lacking, self.sources, kept, keys[kept], at[kept]


class CachedRows:
    """The rows of one width in one call, as :class:`RowsOfLookups`; nothing is trained by them."""

    def __init__(self, number: int, run: _Run) -> None:
        self._number, self._run = number, run
        self._made, self._positions = run.with_padding()
        self._begins = np.cumsum([0, *run.sizes]).tolist()

    def run_of(self, part: int) -> int:
        """See :class:`RowsOfLookups`."""
        del part
        return self._number

    def table_of(self, part: int) -> int:
        """See :class:`RowsOfLookups`: nothing is added to these."""
        return part

    def padding_of(self, part: int) -> int:
        """See :class:`RowsOfLookups`."""
        return self._run.paddings[part]

    def position_of(self, part: int, padding: int) -> int:
        """See :class:`RowsOfLookups`."""
        return self._run.size if padding == self._run.paddings[part] else -1

    def rows(self, run: int) -> Tensor:
        """See :class:`RowsOfLookups`: a row for each id, and for padding ids one more."""
        del run
        return self._made

    def positions(self, parts: Sequence[int]) -> Tensor:
        """See :class:`RowsOfLookups`."""
        begins = self._begins
        if _is_range(parts):
            return self._positions[begins[parts[0]] : begins[parts[-1] + 1]]
        return torch.cat([self._positions[begins[part] : begins[part + 1]] for part in parts])

    def layout(self, parts: Sequence[int]) -> Tensor:
        """See :class:`RowsOfLookups`."""
        of_all = self._run.layout.parts
        return of_all[:, parts[0] : parts[-1] + 1] if _is_range(parts) else of_all[:, list(parts)]


def _is_range(parts: Sequence[int]) -> bool:
    return list(parts) == list(range(parts[0], parts[-1] + 1))


@dataclass(frozen=True)
class CachedPart:
    """The part of a call's rows that one lookup reads; see :class:`FoundPart`."""

    pack: CachedRows
    part: int
