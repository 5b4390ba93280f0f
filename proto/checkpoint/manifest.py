"""The manifest: what belongs to a checkpoint, with sizes and checksums. Written last: without it there is none."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal

import xxhash
from google.protobuf.message import DecodeError as ProtobufDecodeError
from pydantic import TypeAdapter

from .. import control_pb2 as pb
from ..documents import Count, HexId64, Int, SlotCount, Text, checked, parse_json
from ..errors import (
    DataLoss,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    SparserowError,
    not_allowed,
)
from ..schema_message import message_of_schema, schema_of_message
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
from .folder import Folder

FORMAT = 2
FORMATS = (1, 2)  # that this program reads
FILE = "manifest.json"
READ_WHOLE_FILE = "read-whole.json"
MOST_BYTES = 256 << 20  # of a manifest
_MOST_NOTE_BYTES = 4096


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Attributes:
        name: of its folder.
        created: UTC, ISO 8601.
        cluster_id, slot_count, shards, lineage: of the cluster that wrote it.
        slots: files with the last version given in each slot, and whether the slot is here with all its rows.
        base: name of the checkpoint in the same folder that this one adds what changed to; empty: it has all rows.
        chain: how many checkpoints it needs beside itself; ``chain_bytes`` of rows are in those that have not all.
        needs: their names, the oldest first; empty also where a program wrote it that did not note them.
        full_bytes: of the rows of the oldest of them, which has all; 0 likewise.
        since_full: saves since one had all rows.
        job: id of the job whose workers gave their states; 0: rows alone.
        config: what the job was made of, as its author gave it.
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
        """Of the job that saved; -1 when it saved rows alone, or before its first step."""
        return next((job.step for job in self.jobs if job.job_id == self.job), -1)

    @property
    def rows(self) -> int:
        """Of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def row_bytes(self) -> int:
        """Of the files of its rows."""
        return sum(facts.bytes for facts in _distinct(part for table in self.tables for part in table.parts))

    @property
    def size(self) -> int:
        """Of all files but the manifest."""
        return sum(facts.bytes for facts in self.files())

    def files(self) -> list[FileFacts]:
        """All files but the manifest, each once."""
        return _distinct([*(part for table in self.tables for part in table.parts), *self.slots, *self.workers])

    def check_names(self) -> None:
        """Raises DataLoss when two different files have one name."""
        known: dict[str, tuple[int, str]] = {}
        for facts in (*(part for table in self.tables for part in table.parts), *self.slots, *self.workers):
            if known.setdefault(facts.file, (facts.bytes, facts.xxh3)) != (facts.bytes, facts.xxh3):
                raise DataLoss(f"{self.name}: two files are named {facts.file}")

    def to_bytes(self) -> bytes:
        """The file.

        Raises:
            ResourceExhausted: it is longer than a program reads.
        """
        document = asdict(replace(self, tables=()))
        parts = {part.file: part for table in self.tables for part in table.parts}
        number = {file: index for index, file in enumerate(parts)}
        document["parts"] = [[part.file, part.bytes, part.xxh3, part.shard] for part in parts.values()]
        document["tables"] = [
            {
                "name": table.schema.full_name,
                "schema": base64.b64encode(message_of_schema(table.schema).SerializeToString()).decode(),
                "optimizer": type(table.schema.optimizer).__name__,
                "dim": table.schema.dim,
                "dtype": table.schema.dtype,
                "parts": [[number[part.file], part.first_slot, part.end_slot, part.rows] for part in table.parts],
            }
            for table in self.tables
        ]
        document["cluster_id"] = f"{self.cluster_id:x}"
        body = json.dumps({"format": FORMAT, **document}, sort_keys=True)
        data = json.dumps({"xxh3": _checksum(body), "checkpoint": json.loads(body)}, indent=1).encode()
        if len(data) > MOST_BYTES:
            raise ResourceExhausted(f"{self.name}/{FILE}: has {len(data)} bytes; allowed: at most {MOST_BYTES}")
        return data

    @staticmethod
    def of_bytes(data: bytes, where: str) -> Manifest:
        """The manifest of a file's bytes.

        Raises:
            DataLoss: it is damaged.
            FailedPrecondition: it is of another version.
        """
        document = parse_json(data, where, MOST_BYTES)
        try:
            body = document["checkpoint"]
            if body["format"] not in FORMATS:
                raise FailedPrecondition(f"{where}: has format {body['format']}; this program reads formats 1 and 2")
            if document["xxh3"] != _checksum(json.dumps(body, sort_keys=True)):
                raise DataLoss(f"{where}: is damaged: its checksum does not hold")
            fields = _fields_of(body)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ProtobufDecodeError) as error:
            if isinstance(error, SparserowError):
                raise
            raise DataLoss(f"{where}: is damaged, or no manifest: {type(error).__name__}: {error}") from None
        return checked(_MANIFEST, fields, where)


def _fields_of(body: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields as documents of today's format, which are not checked yet."""
    is_first = body["format"] == 1
    written = body.get("parts", ())
    every_slot = {"first_slot": 0, "end_slot": body["slot_count"]}
    tables = [
        {
            "schema": schema_of_message(pb.TableSchema.FromString(base64.b64decode(table["schema"]))),
            "parts": [part if is_first else _part_of(part, written) for part in table["parts"]],
        }
        for table in body["tables"]
    ]
    slots = [{**every_slot, **entry} for entry in body["slots"]]
    return {"since_full": body["chain"], **body, "tables": tables, "slots": slots}


_MANIFEST = TypeAdapter(Manifest)


def _checksum(text: str) -> str:
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _part_of(part: list[Any], written: list[list[Any]]) -> dict[str, Any]:
    number, first_slot, end_slot, rows = part
    if type(number) is not int or number < 0:
        raise ValueError(f"a part's file is number {number!r}; allowed: an integer >= 0")
    file, size, xxh3, shard = written[number]
    facts = {"file": file, "bytes": size, "xxh3": xxh3, "shard": shard}
    return {**facts, "first_slot": first_slot, "end_slot": end_slot, "rows": rows}


def _distinct(facts: Iterable[FileFacts]) -> list[FileFacts]:
    return list({each.file: each for each in facts}.values())


def now_text() -> str:
    """The present time as a manifest has it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def list_names(folder: Folder, known: set[str] | None = None) -> list[str]:
    """Checkpoints in a folder, the oldest first.

    Args:
        folder: where they are.
        known: names that have been seen with a manifest, which are not looked at again; it is brought up to date.
    """
    known = set() if known is None else known
    there = [name for name in folder.names() if number_of(name) is not None]
    known.intersection_update(there)
    known.update(name for name in there if name not in known and (folder / name).exists(FILE))
    return sorted(known, key=lambda name: number_of(name) or 0)


def read_manifest(folder: Folder, name: str | None = None) -> Manifest:
    """A checkpoint's manifest; None is the newest one.

    Raises:
        NotFound: there is no such checkpoint.
        DataLoss, FailedPrecondition: as :meth:`Manifest.of_bytes`.
    """
    if name is None:
        return _newest(folder)
    try:
        if number_of(name) is None:
            raise NotFound(f"{name!r} is no name of a checkpoint")
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
            continue  # being written, or left by a save that was killed
        return replace(Manifest.of_bytes(data, f"{folder.url}/{name}/{FILE}"), name=name)
    raise NotFound(f"{folder.url}: there is no checkpoint")


def read_chain(folder: Folder, name: str | None = None) -> list[Manifest]:
    """A checkpoint after all that it adds to, the oldest of which has all rows; None is the newest one.

    Raises:
        NotFound: there is no such checkpoint.
        DataLoss: one that it needs is missing, or a manifest is damaged.
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


def needs_of(folder: Folder, manifest: Manifest) -> tuple[str, ...]:
    """Names of the checkpoints that one adds to, the oldest first.

    Raises:
        DataLoss: as :func:`read_chain`, where a program wrote it that did not note them.
    """
    if manifest.needs or not manifest.base:
        return manifest.needs
    return tuple(each.name for each in read_chain(folder, manifest.name)[:-1])


def begin_folder(folder: Folder, known: set[str] | None = None) -> str:
    """Makes the folder of a new checkpoint, and removes what killed saves have left.

    One cluster at a time saves to a folder.

    Args:
        folder: where checkpoints are kept.
        known: as in :func:`list_names`.

    Raises:
        FailedPrecondition, ResourceExhausted: it cannot be made.
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
    """Reads every file of a checkpoint and of those that it adds to, and compares; returns the bytes read.

    Raises:
        DataLoss: a file is missing or differs; names it.
    """
    for manifest in chain:
        for facts in manifest.files():
            check_file(folder / manifest.name, facts)
    return sum(manifest.size for manifest in chain)


def check_written(written: Folder, manifest: Manifest) -> None:
    """Compares a checkpoint's folder with its manifest, which is not written yet: names and sizes, by one listing.

    Raises:
        DataLoss: two files have one name, or a file is missing or has another size.
    """
    manifest.check_names()
    sizes = written.sizes()
    for facts in manifest.files():
        if sizes.get(facts.file) != facts.bytes:
            found = f"has {sizes[facts.file]} bytes" if facts.file in sizes else "is missing"
            raise DataLoss(f"{written.url}/{facts.file}: {found}; {facts.bytes} were written")


def check_file(folder: Folder, facts: FileFacts) -> memoryview:
    """The bytes of a file whose size and checksum hold.

    Raises:
        DataLoss: it is missing or differs; names it.
    """
    where = f"{folder.url}/{facts.file}"
    try:
        data = folder.read(facts.file)
    except NotFound:
        raise DataLoss(f"{where}: is missing; the checkpoint is damaged") from None
    check_bytes(data, facts, where, "is damaged: its checksum does not hold")
    return data


def check_bytes(data: memoryview, facts: FileFacts, where: str, damage: str) -> None:
    """Compares a file's bytes with what its manifest says.

    Raises:
        DataLoss: the size differs, or the checksum, which ``damage`` words; names ``where``.
    """
    if len(data) != facts.bytes:
        raise DataLoss(f"{where}: has {len(data)} bytes, its manifest says {facts.bytes}")
    if xxhash.xxh3_64_hexdigest(data) != facts.xxh3:
        raise DataLoss(f"{where}: {damage}")


def note_read_whole(folder: Folder, name: str) -> None:
    """Notes in the folder that every row file of a checkpoint was read, and is as it was written.

    Raises:
        FailedPrecondition, ResourceExhausted: the note cannot be written.
    """
    folder.put(READ_WHOLE_FILE, json.dumps({"name": name}).encode())


def last_read_whole(folder: Folder) -> str | None:
    """Name of the checkpoint that was read whole last; None: none was, or the note is damaged."""
    try:
        note = parse_json(folder.read_small(READ_WHOLE_FILE, _MOST_NOTE_BYTES), READ_WHOLE_FILE, _MOST_NOTE_BYTES)
    except (NotFound, DataLoss):
        return None
    name = note.get("name") if isinstance(note, dict) else None
    return name if isinstance(name, str) else None


def prune(folder: Folder, keep: int, known: set[str] | None = None) -> list[str]:
    """Removes all but the newest ``keep`` checkpoints, the one that was read whole last, and those that they add to.

    Returns:
        Names of those that were removed.

    Raises:
        InvalidArgument: ``keep`` below 1.
    """
    if keep < 1:
        raise not_allowed("checkpoint.keep", keep, ">= 1")
    names = list_names(folder, known)
    kept = {*names[-keep:], last_read_whole(folder)}.intersection(names)
    needed = set(kept)
    for name in kept:
        needed.update(needs_of(folder, read_manifest(folder, name)))
    gone = [name for name in names if name not in needed]
    for name in gone:
        (folder / name).remove()
    return gone
