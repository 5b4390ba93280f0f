"""``publish``: writes an immutable version of a model, from a running cluster's rows and the trainer's dense side."""

from __future__ import annotations

import fnmatch
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _client
from ...proto import changes_pb2 as pb, changes_pb2_grpc as pb_grpc
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.tensor_file import Tensor
from ...proto.cluster_view import ClusterView
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, not_allowed
from ...proto.grpc_status import error_of_status
from ...proto.options.units import format_bytes
from ...proto.process.lone_work import lone_work
from ...proto.published.feature_files import write_features
from ...proto.published.manifest import (
    PROGRAM,
    SERVED_DTYPES,
    SLOTS,
    ModelManifest,
    Part,
    PublishedTable,
    ServedDtype,
    Sign,
)
from ...proto.published.registry import ModelRegistry
from ...proto.published.row_parts import write_file, write_rows, write_tensors
from ...proto.schema import TableSchema
from ...proto.security.channels import SecureChannel
from ...proto.security.security import loaded_security
from ..membership.shard_client import shard_client
from .asked_version import check_model, check_names, checked_card, checked_sign, without_tables
from .featured_program import featured_source
from .program_export import Program, ProgramSource, ProgramTensor, export_program

if TYPE_CHECKING:
    import torch

    from ...proto.features.cells import Columns
    from ..data.feature_tensors import Features
    from ..session.session import JobSession

log = logging.getLogger(__name__)

_PART_BYTES = 32 << 20  # a serving process reads some parts at once, each whole
_CURSOR_IDLE_SEC = 1800  # how long shards keep the changes since a publication, so that live sync needs no whole slots
_CALL_DEADLINE_SEC = 30.0


@dataclass(frozen=True)
class Published:
    """A version that was written.

    Attributes:
        model: the name of the model.
        version: the number of the version.
        rows: the number of rows in all tables.
        bytes: the size of all files, in bytes.
        url: the URL of the version's folder.
        program_bytes: the size of the program, in bytes; 0 when there is none.
        largest_tensors: the largest tensors of the program, at most three.
    """

    model: str
    version: int
    rows: int
    bytes: int
    url: str
    program_bytes: int = 0
    largest_tensors: tuple[ProgramTensor, ...] = ()


@dataclass(frozen=True)
class Publication:
    """The contents and options of a publication.

    Args:
        name: the name of the model.
        root: the folder of the registry, by path or URL.
        alias: the alias that names the version afterwards; None: no alias does.
        dtype: the dtype of the published rows, for all tables or by pattern of their names. None, or no matching
            pattern: the dtype in which training stores the rows.
        card: facts about the version for the manifest, such as step, data_position or auc.
        program: the dense side, as a model to export or an exported program; None: only rows are published.
        without: the names of tables of the namespace that are not published.
        features: the files that make the program's arguments of columns, by name; none: it takes tensors.
        sign: "rows": the signature covers the rows too, by the SHA-256 of their files. None: it covers all else. A
            version is signed where the security file names a signing key.
    """

    name: str
    root: str
    alias: str | None = "live"
    dtype: ServedDtype | Mapping[str, ServedDtype] | None = None
    card: Mapping[str, Any] = field(default_factory=dict)
    program: ProgramSource | Program | None = None
    without: tuple[str, ...] = ()
    features: Mapping[str, bytes] = field(default_factory=dict)
    sign: Sign | None = None


def publish(
    session: JobSession,
    name: str,
    *,
    root: str,
    model: torch.nn.Module | None = None,
    example: tuple[Any, ...] | Columns | None = None,
    features: Features | None = None,
    dynamic_shapes: Any = None,
    alias: str | None = "live",
    dtype: ServedDtype | Mapping[str, ServedDtype] | None = None,
    card: Mapping[str, Any] | None = None,
    sign: Sign | None = None,
) -> Published:
    """Writes the rows of the session's namespace, and the model, as a new version; then moves the alias to it.

    Rows are read while training goes on. Each row is whole, and live sync brings all rows to one state. When anything
    fails, nothing is published, and the alias stays where it was. One worker of the job calls it. A dense tower that is
    on the servers is part of the program, and its table is not published besides.

    Args:
        name: the name of the model.
        root: the folder of published models, by path or URL.
        model: the model, in any mode; ``torch.export`` exports it in eval mode, and a compiled model as it was before.
            None: only rows are published.
        example: example arguments of the model's forward, needed with ``model``; they are not published. With
            ``features`` they are columns of two rows or more.
        features: makes the arguments of the model's forward, which has one for each feature, by its name. A served
            model then takes columns. None: it takes tensors.
        dynamic_shapes: the dimensions that vary, as ``torch.export.export`` takes them. None: the first dimension of
            every tensor of ``example`` varies.
        alias: the alias that names the version afterwards; None: no alias does.
        dtype: the dtype of the published rows: "float32", "bfloat16", "float16" or "int8" for all tables, or a mapping
            from patterns of table names to a dtype. None, or no matching pattern: the dtype in training.
        card: facts about the version for the manifest, to which ``step`` is added. None: no further facts.
        sign: "rows": the signature covers the rows too, by the SHA-256 of their files. None: it covers all else. A
            version is signed where the security file names a signing key.

    Returns:
        The version that was written.

    Raises:
        InvalidArgument: an argument is not allowed, the model shares memory with ``example``, or ``sign`` is given
            without a signing key.
        FailedPrecondition: the session is closed or has no cluster, a row is not finite, ranks have parts of the
            model, or a feature differs from that which the namespace keeps.
        Unavailable: a shard is down; the text names it.
        NotFound: the namespace has no tables, and there is no model.
    """
    session.core.native.check_usable()
    if not isinstance(session.core.catalog, ControlClient):
        raise FailedPrecondition("publish: it needs a session of a cluster (sr.connect), not of stores in this process")
    check_names(name, alias)
    check_model(model, example, features)
    card = checked_card(card or {})
    if features is not None:
        from ..session.namespace_features import check_kept

        check_kept(session.core, features.set)
    program, files = _source(model, example, features, dynamic_shapes)
    return publish_program(session, Publication(name, root, alias, dtype, card, program, features=files, sign=sign))


def publish_program(
    session: JobSession, publication: Publication, progress: Callable[[int], None] | None = None
) -> Published:
    """Publishes from a session's cluster; see :func:`publish`.

    Args:
        session: a session of a cluster.
        publication: the contents; the card gets ``step``, and a dense tower on the servers is part of the program.
        progress: called with the number of rows written so far; None: not called.
    """
    assert isinstance(session.core.catalog, ControlClient)
    program = publication.program
    session.flush()
    tower = None if program is None else session.core.read_dense_rows()
    card = {"step": session.current_step, **publication.card}
    whole = replace(publication, card=card, without=() if tower is None else (tower,))
    done = publish_from(session.core.catalog, session.namespace, whole, progress)
    if done.program_bytes:
        largest = ", ".join(map(str, done.largest_tensors)) or "none"
        size, version = format_bytes(done.program_bytes), f"{done.model}@{done.version}"
        print(f"sparserow: {version}: a program of {size}; its largest tensors: {largest}", file=sys.stderr)
    return done


def _source(
    model: torch.nn.Module | None, example: Any, features: Features | None, dynamic_shapes: Any
) -> tuple[ProgramSource | None, dict[str, bytes]]:
    """Returns the model to export, and the files of its features by name."""
    if features is None:
        return (None if model is None else ProgramSource(model, example, dynamic_shapes)), {}
    if model is None:
        raise InvalidArgument("publish.features: has no effect without model")
    if dynamic_shapes is not None:
        raise not_allowed("publish.dynamic_shapes", dynamic_shapes, "None with features, which say what varies")
    return featured_source(model, features, example)


def publish_from(
    control: ControlClient,
    namespace: str,
    publication: Publication,
    progress: Callable[[int], None] | None = None,
) -> Published:
    """Publishes from a cluster through its coordinator; see :func:`publish` for the errors.

    Args:
        control: the client of the coordinator.
        namespace: the namespace whose tables are published.
        publication: the contents and options.
        progress: called with the number of rows written so far; None: not called.
    """
    check_names(publication.name, publication.alias)
    security = loaded_security(control.security)
    sign = checked_sign(publication.sign, security)
    card = checked_card(publication.card)
    schemas = without_tables(control.list_tables(namespace), publication.without, namespace)
    if not schemas and publication.program is None:
        raise NotFound(f"namespace {namespace!r} has no tables to publish at {control.address}")
    dtypes = _dtypes(schemas, publication.dtype)
    registry = ModelRegistry(publication.root)
    program = publication.program
    if isinstance(program, ProgramSource):
        program = export_program(program, is_signed=bool(security.signing_key))
    view = control.cluster()
    version = registry.claim_version(publication.name)
    folder = registry.folder(publication.name, version)
    try:
        slots = _slot_versions(control, view, f"publish/{publication.name}@{version}", schemas)
        client = shard_client(view, control.security)
        writer = _RowWriter(folder, client, len(view.shards), progress, is_signed=sign == "rows")
        tables = tuple(
            PublishedTable(schema, dtypes[schema.name], tuple(writer.write(schema, dtypes[schema.name], index)))
            for index, schema in enumerate(schemas)
        )
        manifest = ModelManifest(
            model=publication.name,
            version=version,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            cluster_id=view.cluster_id,
            slot_count=view.slot_count,
            namespace=namespace,
            tables=tables,
            slots=write_tensors(folder, SLOTS, {"version": Tensor("U64", slots)}),
            program=None if program is None else write_file(folder, PROGRAM, [program.archive]),
            card=card,
            features=write_features(folder, publication.features),
            sign=sign,
        ).signed(security)
        registry.finish(manifest)
    except BaseException:
        registry.abandon(publication.name, version)
        raise
    if publication.alias is not None:
        registry.point(publication.name, publication.alias, version)
    done = Published(publication.name, version, manifest.rows, manifest.size, folder.url)
    return (
        done if program is None else replace(done, program_bytes=len(program.archive), largest_tensors=program.largest)
    )


class _RowWriter:
    """Writes the rows of tables into part files, shard by shard."""

    def __init__(
        self,
        folder: Folder,
        client: _client.Client,
        shards: int,
        progress: Callable[[int], None] | None,
        *,
        is_signed: bool,
    ) -> None:
        self._folder = folder
        self._client = client
        self._shards = shards
        self._progress = progress
        self._is_signed = is_signed
        self._done = 0

    def write(self, schema: TableSchema, dtype: ServedDtype, index: int) -> Iterator[Part]:
        """Writes the parts of one table one after the other, and yields each.

        Args:
            schema: the schema of the table.
            dtype: the dtype of the published rows.
            index: the number of the table in the version.
        """
        part_rows = max(1, min(1 << 20, _PART_BYTES // (16 + 4 * schema.dim)))
        for shard in range(self._shards):
            for number, (keys, versions, rows) in enumerate(self._chunks(schema, shard, part_rows)):
                if not bool(np.isfinite(rows).all()):
                    bad = keys[~np.isfinite(rows).all(axis=1)][0]
                    raise FailedPrecondition(f"table {schema.full_name}: the row of key {bad} is not finite")
                file = f"rows.{index}.{shard}.{number}.safetensors"
                yield write_rows(self._folder, file, dtype, keys, versions, rows, is_signed=self._is_signed)
                self._done += len(keys)
                lone_work.progress(f"{self._done:,} rows")
                if self._progress is not None:
                    self._progress(self._done)

    def _chunks(
        self, schema: TableSchema, shard: int, part_rows: int
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float32]]]:
        pages: list[tuple[Any, Any, Any]] = []
        count = 0
        for keys, versions, _, rows, _ in self._client.scan(schema.id, shard=shard, max_rows=min(part_rows, 65536)):
            pages.append((keys, versions, rows))
            count += len(keys)
            if count >= part_rows:
                yield _joined(pages)
                pages, count = [], 0
        if pages:
            yield _joined(pages)


def _joined(pages: list[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    keys, versions, rows = (np.concatenate(column) for column in zip(*pages, strict=True))
    return keys, versions, rows


def _slot_versions(
    control: ControlClient, view: ClusterView, cursor: str, schemas: tuple[TableSchema, ...]
) -> NDArray[np.uint64]:
    """Returns the version that each slot has at its owner now, (slot_count) uint64.

    From then on the owner keeps changes for followers under the name ``cursor``.
    """
    addresses = {entry.shard: entry.control for entry in control.status().shards}
    versions = np.zeros(view.slot_count, np.uint64)
    for shard in view.shards:
        address = f"{addresses[shard.index].host}:{addresses[shard.index].port}"
        with SecureChannel(address, control.identity) as channel:
            request = pb.GetVersionsRequest(
                cluster_id=view.cluster_id,
                cursor=cursor,
                idle_sec=_CURSOR_IDLE_SEC,
                table_ids=[schema.id for schema in schemas],
            )
            stub: Any = pb_grpc.ChangesStub(channel)
            try:
                reply = stub.GetVersions(request, timeout=_CALL_DEADLINE_SEC)
            except grpc.RpcError as error:
                raise error_of_status(error, f"shard {shard.index} at {address}") from None
        own = np.frombuffer(reply.versions, "<u8")
        if len(own) != view.slot_count:
            raise Unavailable(f"shard {shard.index} has {len(own)} slots, but the cluster has {view.slot_count}")
        mine = view.slot_owner == shard.index
        versions[mine] = own[mine]
    return versions


def _dtypes(
    schemas: tuple[TableSchema, ...], dtype: ServedDtype | Mapping[str, ServedDtype] | None
) -> dict[str, ServedDtype]:
    patterns = dict(dtype) if isinstance(dtype, Mapping) else ({} if dtype is None else {"*": dtype})
    for pattern, chosen in patterns.items():
        if chosen not in SERVED_DTYPES:
            raise not_allowed("dtype", chosen, SERVED_DTYPES)
        if not any(fnmatch.fnmatchcase(schema.name, pattern) for schema in schemas):
            names = ", ".join(schema.name for schema in schemas)
            raise InvalidArgument(f"dtype[{pattern!r}] matches no table; tables: {names}")

    def of(schema: TableSchema) -> ServedDtype:
        matching = (chosen for pattern, chosen in patterns.items() if fnmatch.fnmatchcase(schema.name, pattern))
        return next(matching, schema.dtype)

    return {schema.name: of(schema) for schema in schemas}
