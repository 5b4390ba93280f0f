"""The manifest: what belongs to a checkpoint, with sizes and checksums. Written last: without it there is none."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import xxhash

from .. import control_pb2 as pb
from ..errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, SparserowError
from ..schema import TableSchema
from ..schema_message import message_of_schema, schema_of_message
from .folder import Folder

FORMAT = 1
FILE = "manifest.json"
READ_WHOLE_FILE = "read-whole.json"
_NAME = re.compile(r"save-(\d{6,})")


@dataclass(frozen=True)
class FileFacts:
    """A file of a checkpoint or published model: its name, bytes, and the XXH3-64 of these in hexadecimal digits."""

    file: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class PartEntry(FileFacts):
    """Rows of one table in slots [first_slot, end_slot) of one shard."""

    shard: int
    first_slot: int
    end_slot: int
    rows: int


@dataclass(frozen=True)
class TableEntry:
    """A table and its rows."""

    schema: TableSchema
    parts: tuple[PartEntry, ...]

    @property
    def rows(self) -> int:
        """How many."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class WorkerEntry(FileFacts):
    """What a worker gave: dense side, optimizers, reader, random numbers."""

    rank: int
    worker_id: int
    epoch: int


@dataclass(frozen=True)
class JobEntry:
    """A job at the cut.

    Attributes:
        step: the last one in the cut, -1 before the first; without staleness 0 the highest of any worker.
        sequences: (worker id, epoch, last sequence in the cut).
        windows: by shard, what each knew of the workers' commits (``install_jobs`` of the native server).
        data: how much of an epoch the rows have, where the coordinator leases data; else {}.
    """

    job_id: int
    name: str
    staleness: int | None
    generation: int
    step: int
    sequences: tuple[tuple[int, int, int], ...]
    windows: tuple[dict[str, Any], ...]
    data: dict[str, Any] = field(default_factory=dict)


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
        job: id of the job whose workers gave their states; 0: rows alone.
        config: what the job was made of, as its author gave it.
    """

    name: str
    created: str
    cluster_id: int
    slot_count: int
    shards: int
    lineage: int
    tables: tuple[TableEntry, ...] = ()
    slots: tuple[FileFacts, ...] = ()
    jobs: tuple[JobEntry, ...] = ()
    workers: tuple[WorkerEntry, ...] = ()
    job: int = 0
    base: str = ""
    chain: int = 0
    chain_bytes: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)

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
        return sum(part.bytes for table in self.tables for part in table.parts)

    @property
    def size(self) -> int:
        """Of all files but the manifest."""
        return sum(facts.bytes for facts in self.files())

    def files(self) -> list[FileFacts]:
        """All files but the manifest."""
        return [*(part for table in self.tables for part in table.parts), *self.slots, *self.workers]

    def to_bytes(self) -> bytes:
        """The file."""
        document = asdict(self)
        document["tables"] = [
            {
                "name": table.schema.full_name,
                "schema": base64.b64encode(message_of_schema(table.schema).SerializeToString()).decode(),
                "optimizer": type(table.schema.optimizer).__name__,
                "dim": table.schema.dim,
                "dtype": table.schema.dtype,
                "parts": [asdict(part) for part in table.parts],
            }
            for table in self.tables
        ]
        document["cluster_id"] = f"{self.cluster_id:x}"
        body = json.dumps({"format": FORMAT, **document}, sort_keys=True)
        return json.dumps({"xxh3": _checksum(body), "checkpoint": json.loads(body)}, indent=1).encode()

    @staticmethod
    def of_bytes(data: bytes, where: str) -> Manifest:
        """The manifest of a file's bytes.

        Raises:
            DataLoss: it is damaged.
            FailedPrecondition: it is of another version.
        """
        try:
            document = json.loads(data)
            body = document["checkpoint"]
            if body["format"] != FORMAT:
                raise FailedPrecondition(f"{where}: has format {body['format']}; this program reads format {FORMAT}")
            if document["xxh3"] != _checksum(json.dumps(body, sort_keys=True)):
                raise DataLoss(f"{where}: is damaged: its checksum does not hold")
            del body["format"]
            body["cluster_id"] = int(body["cluster_id"], 16)
            body["tables"] = tuple(
                TableEntry(
                    schema_of_message(pb.TableSchema.FromString(base64.b64decode(table["schema"]))),
                    tuple(PartEntry(**part) for part in table["parts"]),
                )
                for table in body["tables"]
            )
            body["slots"] = tuple(FileFacts(**entry) for entry in body["slots"])
            body["workers"] = tuple(WorkerEntry(**entry) for entry in body["workers"])
            body["jobs"] = tuple(_job_of(entry) for entry in body["jobs"])
            return Manifest(**body)
        except SparserowError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise DataLoss(f"{where}: is damaged, or no manifest: {type(error).__name__}: {error}") from None


def _checksum(text: str) -> str:
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _job_of(entry: dict[str, Any]) -> JobEntry:
    sequences = tuple((worker, epoch, sequence) for worker, epoch, sequence in entry["sequences"])
    return JobEntry(**{**entry, "sequences": sequences, "windows": tuple(entry["windows"])})


def now_text() -> str:
    """The present time as a manifest has it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def number_of(name: str) -> int | None:
    """The number of a checkpoint's folder; None for a name that is none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_names(folder: Folder) -> list[str]:
    """Checkpoints in a folder, the oldest first."""
    found = [name for name in folder.names() if number_of(name) is not None and (folder / name).exists(FILE)]
    return sorted(found, key=lambda name: number_of(name) or 0)


def read_manifest(folder: Folder, name: str | None = None) -> Manifest:
    """A checkpoint's manifest; None is the newest one.

    Raises:
        NotFound: there is no such checkpoint.
        DataLoss, FailedPrecondition: as :meth:`Manifest.of_bytes`.
    """
    names = list_names(folder)
    if name is None and not names:
        raise NotFound(f"{folder.url}: there is no checkpoint")
    name = names[-1] if name is None else name
    if name not in names:
        raise NotFound(f"{folder.url}: there is no checkpoint {name!r}; there are: {', '.join(names) or 'none'}")
    held = folder / name
    manifest = Manifest.of_bytes(bytes(held.read(FILE)), f"{held.url}/{FILE}")
    return replace(manifest, name=name)


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


def begin_folder(folder: Folder) -> str:
    """Makes the folder of a new checkpoint, and removes what killed saves have left.

    One cluster at a time saves to a folder.

    Raises:
        FailedPrecondition, ResourceExhausted: it cannot be made.
    """
    folder.make()
    folder.abort_uploads("save-")
    last = 0
    for name in folder.names():
        number = number_of(name)
        if number is None:
            continue
        last = max(last, number)
        if not (folder / name).exists(FILE):
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


def check_file(held: Folder, facts: FileFacts) -> memoryview:
    """The bytes of a file whose size and checksum hold.

    Raises:
        DataLoss: it is missing or differs; names it.
    """
    where = f"{held.url}/{facts.file}"
    try:
        data = held.read(facts.file)
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
        name = json.loads(bytes(folder.read(READ_WHOLE_FILE)))["name"]
    except (NotFound, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def prune(folder: Folder, keep: int) -> list[str]:
    """Removes all but the newest ``keep`` checkpoints, the one that was read whole last, and those that they add to.

    Returns:
        Names of those that were removed.

    Raises:
        InvalidArgument: ``keep`` below 1.
    """
    if keep < 1:
        raise InvalidArgument(f"checkpoint.keep: {keep} is not allowed; allowed: >= 1")
    names = list_names(folder)
    kept = {*names[-keep:], last_read_whole(folder)}.intersection(names)
    needed = {manifest.name for name in kept for manifest in read_chain(folder, name)}
    gone = [name for name in names if name not in needed]
    for name in gone:
        (folder / name).remove()
    return gone
