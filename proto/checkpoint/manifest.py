"""The manifest: the list of a checkpoint's files with sizes and checksums. It is written last and makes a checkpoint of
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import TypeAdapter

from ..documents import Count, HexId64, Int, SlotCount, Text, checked, parse_json
from ..errors import DataLoss, NotFound, SparserowError, not_allowed
from .best import best_in
from .dense_files import FOLDER, dense_files
from .entries import (
    CheckpointName as CheckpointName,
    FileFacts as FileFacts,
    JobEntry as JobEntry,
    PartEntry as PartEntry,
    SlotsEntry as SlotsEntry,
    TableEntry as TableEntry,
    WorkerEntry as WorkerEntry,
    number_of as number_of,
)
from .file_check import BlockReader, read_checked
from .folder import Folder
from .manifest_format import MOST_BYTES, bytes_of_manifest, fields_of_bytes

FILE = "manifest.json"
READ_WHOLE_FILE = "read-whole.json"
DAMAGED_FILE = "damaged.json"
_MOST_NOTE_BYTES = 4096
_MOST_DAMAGED = 128  # names in the note; older ones are far from the newest chain


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        name: the name of its folder.
        created: the time of the save in UTC, ISO 8601.
        cluster_id, slot_count, shards, lineage: facts of the cluster that wrote the checkpoint.
        tables: the tables and the files of their rows.
        slots: the files with the last version given in each slot, and whether the checkpoint has all rows of the slot.
        jobs: the state of each job at the cut.
        workers: the files with the state of each worker.
        job: the id of the job whose workers gave their states; 0 when rows were saved alone.
        base: the name of the checkpoint in the same folder whose changes this one holds; empty when it has all rows.
        chain: the number of checkpoints that it needs beside itself.
        chain_bytes: the size of the row files of the checkpoints in the chain that do not have all rows.
        needs: the names of the needed checkpoints, the oldest first.
        full_bytes: the size of the row files of the oldest needed checkpoint, which has all rows. It is 0 where
            ``needs`` is empty.
        since_full: the number of saves since a checkpoint had all rows.
        config: the configuration of the job, as its author gave it.
        stats: numbers about the save.
    """

    name: CheckpointName
    created: Text
    cluster_id: HexId64
    slot_count: SlotCount
    shards: Count
    lineage: Count
    tables: tuple[TableEntry, ...] = ()
    slots: tuple[SlotsEntry, ...] = ()
    jobs: tuple[JobEntry, ...] = ()
    workers: tuple[WorkerEntry, ...] = ()
    job: Count = 0
    base: CheckpointName | Literal[""] = ""
    chain: Count = 0
    chain_bytes: Count = 0
    needs: tuple[CheckpointName, ...] = ()
    full_bytes: Count = 0
    since_full: Count = 0
    config: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last step of the job that saved; -1 when rows were saved alone, or before the job's first step."""
        return next((job.step for job in self.jobs if job.job_id == self.job), -1)

    @property
    def rows(self) -> int:
        """The number of rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def row_bytes(self) -> int:
        """The size of all row files, in bytes."""
        return sum(facts.bytes for facts in _distinct(part for table in self.tables for part in table.parts))

    @property
    def size(self) -> int:
        """The size of all files except the manifest, in bytes."""
        return sum(facts.bytes for facts in self.files())

    def files(self) -> list[FileFacts]:
        """Returns all files except the manifest, each once."""
        return _distinct([*(part for table in self.tables for part in table.parts), *self.slots, *self.workers])

    def check_names(self) -> None:
        """Raises DataLoss when two different files have the same name."""
        known: dict[str, tuple[int, str]] = {}
        for facts in (*(part for table in self.tables for part in table.parts), *self.slots, *self.workers):
            if known.setdefault(facts.file, (facts.bytes, facts.xxh3)) != (facts.bytes, facts.xxh3):
                raise DataLoss(f"{self.name}: two files are named {facts.file}")

    def to_bytes(self) -> bytes:
        """Returns the bytes of the manifest's file.

        Raises:
            ResourceExhausted: the file is larger than a program reads.
        """
        return bytes_of_manifest(asdict(replace(self, tables=())), self.tables, f"{self.name}/{FILE}")

    @staticmethod
    def of_bytes(data: bytes, where: str) -> Manifest:
        """Returns the manifest that a file's bytes hold.

        Args:
            data: the bytes of the file.
            where: the name of the file, which error messages have.

        Raises:
            DataLoss: the file is damaged.
            FailedPrecondition: the file has another format.
        """
        return checked(_MANIFEST, fields_of_bytes(data, where), where)


_MANIFEST = TypeAdapter(Manifest)


def _distinct(facts: Iterable[FileFacts]) -> list[FileFacts]:
    return list({each.file: each for each in facts}.values())


def now_text() -> str:
    """Returns the present time in the form that a manifest has."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def list_names(folder: Folder, known: set[str] | None = None) -> list[str]:
    """Returns the names of the checkpoints in a folder, the oldest first.

    Args:
        folder: the folder of the checkpoints.
        known: names that are known to have a manifest; these are not looked at again, and the set is brought up to
            date. None means an empty set.
    """
    known = set() if known is None else known
    there = [name for name in folder.names() if number_of(name) is not None]
    known.intersection_update(there)
    known.update(name for name in there if name not in known and (folder / name).exists(FILE))
    return sorted(known, key=lambda name: number_of(name) or 0)


def read_manifest(folder: Folder, name: str | None = None) -> Manifest:
    """Returns the manifest of a checkpoint.

    Args:
        folder: the folder of the checkpoints.
        name: the name of the checkpoint; None means the newest one.

    Raises:
        NotFound: there is no such checkpoint.
        DataLoss, FailedPrecondition: as for :meth:`Manifest.of_bytes`.
    """
    if name is None:
        return _newest(folder)
    try:
        if number_of(name) is None:
            raise NotFound(f"{name!r} is not the name of a checkpoint")
        data = (folder / name).read_small(FILE, MOST_BYTES)
    except NotFound:
        there = ", ".join(list_names(folder)) or "none"
        raise NotFound(f"{folder.url}: there is no checkpoint {name!r}; there are: {there}") from None
    return replace(Manifest.of_bytes(data, f"{folder.url}/{name}/{FILE}"), name=name)


def _newest(folder: Folder) -> Manifest:
    there = [name for name in folder.names() if number_of(name) is not None]
    for name in sorted(there, key=lambda name: number_of(name) or 0, reverse=True):
        try:
            data = (folder / name).read_small(FILE, MOST_BYTES)
        except NotFound:
            continue  # the checkpoint is being written, or a killed save left it
        return replace(Manifest.of_bytes(data, f"{folder.url}/{name}/{FILE}"), name=name)
    raise NotFound(f"{folder.url}: there is no checkpoint")


def read_chain(folder: Folder, name: str | None = None) -> list[Manifest]:
    """Returns the manifests of a checkpoint and of those that it adds to; the oldest, which has all rows, comes first.

    Args:
        folder: the folder of the checkpoints.
        name: the name of the checkpoint; None means the newest one.

    Raises:
        NotFound: there is no such checkpoint.
        DataLoss: a needed checkpoint is missing, or a manifest is damaged.
    """
    chain = [read_manifest(folder, name)]
    while chain[0].base:
        try:
            base = read_manifest(folder, chain[0].base)
        except NotFound:
            raise DataLoss(f"{folder.url}: {chain[0].name} adds to {chain[0].base}, which is missing") from None
        if base.cluster_id != chain[0].cluster_id or len(chain) > chain[-1].chain:
            raise DataLoss(f"{folder.url}: {chain[0].name} adds to {base.name}, which is of another cluster or chain")
        chain.insert(0, base)
    return chain


def begin_folder(folder: Folder, known: set[str] | None = None) -> str:
    """Makes the folder of a new checkpoint, and removes the remains of killed saves.

    Only one cluster at a time may save to a folder.

    Args:
        folder: the folder of the checkpoints.
        known: names that are known to have a manifest, as in :func:`list_names`.

    Returns:
        The name of the new folder.

    Raises:
        FailedPrecondition, ResourceExhausted: the folder cannot be made.
    """
    folder.make()
    folder.abort_uploads("save-")
    last = 0
    known, names = set() if known is None else known, folder.names()
    known.intersection_update(names)
    for name in names:
        number = number_of(name)
        if number is None:
            continue
        last = max(last, number)
        if name in known or (folder / name).exists(FILE):
            known.add(name)
        else:
            (folder / name).remove()
    made = f"save-{last + 1:06d}"
    (folder / made).make()
    return made


def verify(folder: Folder, chain: list[Manifest]) -> int:
    """Reads every file of a chain of checkpoints, and compares it with its manifest.

    Returns:
        The number of bytes read.

    Raises:
        DataLoss: a file is missing or differs; the text names it.
    """
    size = sum(manifest.size for manifest in chain)
    for manifest in chain:
        place = folder / manifest.name
        try:
            for facts in manifest.files():
                data = check_file(place, facts)
                if isinstance(facts, WorkerEntry) and facts.rank == 0:
                    for part in dense_files(data, f"{place.url}/{facts.file}"):
                        size += len(check_file(place / FOLDER, part))
        except DataLoss:
            note_damaged(folder, manifest.name)
            raise
        note_damaged(folder, manifest.name, is_damaged=False)
    return size


def note_damaged(folder: Folder, name: str, *, is_damaged: bool = True) -> None:
    """Notes in the folder that a file of a checkpoint is missing or differs, so that no later save adds to it.

    A note that cannot be written is left out, as where the store is read-only.

    Args:
        folder: the folder of the checkpoints.
        name: the name of the checkpoint.
        is_damaged: False takes the note back, after the checkpoint was read whole.
    """
    noted = damaged_in(folder)
    if (name in noted) is is_damaged:
        return
    changed = sorted({*noted, name} if is_damaged else noted - {name})
    with suppress(SparserowError, NotImplementedError):
        folder.put(DAMAGED_FILE, json.dumps({"names": changed[-_MOST_DAMAGED:]}).encode())


def note_damage(folder: Folder, chain: Iterable[Manifest], error: DataLoss) -> None:
    """Notes the checkpoint whose file an error names, so that no later save adds to it.

    Args:
        folder: the folder of the checkpoints.
        chain: the checkpoint that was read, and those that it needs.
        error: the error of a file.
    """
    for manifest in chain:
        if f"/{manifest.name}/" in str(error):
            note_damaged(folder, manifest.name)


def damaged_in(folder: Folder) -> set[str]:
    """Returns the names of the checkpoints that were found damaged, of those that are there; none when the note is
    damaged."""
    try:
        note = parse_json(folder.read_small(DAMAGED_FILE, _MOST_NOTE_BYTES), DAMAGED_FILE, _MOST_NOTE_BYTES)
    except (NotFound, DataLoss):
        return set()
    names = note.get("names") if isinstance(note, dict) else None
    if not isinstance(names, list):
        return set()
    return {name for name in names if isinstance(name, str)}.intersection(folder.names())


def check_written(written: Folder, manifest: Manifest) -> None:
    """Compares the names and sizes in a checkpoint's folder with a manifest that is not written yet, by one listing.

    Raises:
        DataLoss: two files have one name, or a file is missing or has another size.
    """
    manifest.check_names()
    sizes = written.sizes()
    for facts in manifest.files():
        if sizes.get(facts.file) != facts.bytes:
            found = f"has {sizes[facts.file]} bytes" if facts.file in sizes else "is missing"
            raise DataLoss(f"{written.url}/{facts.file}: the file {found}; {facts.bytes} bytes were written")


def check_file(folder: Folder, facts: FileFacts, reader: BlockReader | None = None) -> memoryview:
    """Returns the bytes of a file, after comparing its size and checksum.

    Args:
        folder: the folder of its checkpoint.
        facts: the file's entry in the manifest.
        reader: as in :func:`~.file_check.read_checked`.

    Raises:
        DataLoss: the file is missing or differs; the text names it.
        FailedPrecondition, ResourceExhausted: the file cannot be read; the text names it.
    """
    try:
        return read_checked(folder, facts, "is damaged: its checksum does not match", reader)
    except NotFound:
        raise DataLoss(f"{folder.url}/{facts.file}: the file is missing; the checkpoint is damaged") from None


def note_read_whole(folder: Folder, name: str) -> None:
    """Notes in the folder that every row file of a checkpoint was read and matched its manifest.

    Args:
        folder: the folder of the checkpoints.
        name: the name of the checkpoint.

    Raises:
        FailedPrecondition, ResourceExhausted: the note cannot be written.
    """
    folder.put(READ_WHOLE_FILE, json.dumps({"name": name}).encode())


def last_read_whole(folder: Folder) -> str | None:
    """Returns the name of the checkpoint that was last read whole; None when none was, or the note is damaged."""
    try:
        note = parse_json(folder.read_small(READ_WHOLE_FILE, _MOST_NOTE_BYTES), READ_WHOLE_FILE, _MOST_NOTE_BYTES)
    except (NotFound, DataLoss):
        return None
    name = note.get("name") if isinstance(note, dict) else None
    return name if isinstance(name, str) else None


def prune(folder: Folder, keep: int, known: set[str] | None = None) -> list[str]:
    """Removes all checkpoints but the newest ``keep``, the one that was last read whole, the best one of a run
    (``best.py``), and those that they add to.

    Args:
        folder: the folder of the checkpoints.
        keep: the number of newest checkpoints that stay, at least 1.
        known: names that are known to have a manifest, as in :func:`list_names`.

    Returns:
        The names of the removed checkpoints.

    Raises:
        InvalidArgument: ``keep`` is below 1.
    """
    if keep < 1:
        raise not_allowed("checkpoint.keep", keep, ">= 1")
    names = list_names(folder, known)
    best = best_in(folder)
    noted = {last_read_whole(folder), None if best is None else best.name} - damaged_in(folder)
    kept = {*names[-keep:], *noted}.intersection(names)
    needed = set(kept)
    for name in kept:
        needed.update(read_manifest(folder, name).needs)
    gone = [name for name in names if name not in needed]
    for name in gone:
        (folder / name).remove()
    return gone
