"""Runs inference with a published model: its exported program, with rows read from the serving processes."""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.export.passes import move_to_device_pass

from ...cpp_ext import _client
from ...cpp_ext.device.link import link_of
from ...cpp_ext.device_cache import CacheSize, DeviceCache
from ...cpp_ext.device_step import StepOnDevice, register
from ...cpp_ext.torch_arrays import tensor_of
from ...proto.arguments import check_integer, check_number
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.state_tree import decode_tree
from ...proto.closing import Closing
from ...proto.errors import DataLoss, FailedPrecondition, InvalidArgument, not_allowed
from ...proto.published.dense import DenseVersion, check_dense, newest_number, read_dense
from ...proto.published.manifest import ModelManifest
from ...proto.published.proof import trusted_keys
from ...proto.published.registry import ModelRegistry
from ..client.client import ServingClient
from .call_gate import CallGate
from .column_arguments import arguments_of, features_of_version, is_of_columns
from .ids_ahead import IdsAhead, sent_arguments
from .load_program import exported_program
from .lookup_cache import LookupCache
from .program_inputs import ProgramInput, error_of_call, inputs_of
from .served_model_stats import ServedModelStats

if TYPE_CHECKING:
    from ...proto.features.feature_set import FeatureSet
    from ...proto.security.security import Security
    from ..client.replica_map import TableShape

_log = logging.getLogger(__name__)

_REFRESH_SEC = 5.0
_DEADLINE_MS = 1000


@dataclass(frozen=True)
class Prediction:
    """An output of a model, with the versions that produced it.

    Attributes:
        output: the output of the model's forward.
        version: the version of the model, with its program and its rows.
        dense_version: the number of the dense weights, from 1 within the version; 0: those of the program.
        dense_step: the training step of the dense weights; None: they are those of the program, whose card may have it.
    """

    output: Any
    version: int
    dense_version: int
    dense_step: int | None


@dataclass(frozen=True)
class _Loaded:
    """A version in use. It is replaced as a whole, so that all parts of a call belong to one version."""

    version: int
    session: _client.NativeSession
    cache: _client.CachedLookups | DeviceCache | None
    program: torch.export.ExportedProgram
    module: torch.nn.Module
    generation: int  # the generation of the client's connections
    names: frozenset[str]  # the names of tables that the session binds in this process
    on_device: StepOnDevice | None = None  # None: the program is on the host
    ids_ahead: IdsAhead | None = None  # of a program on a device
    features: FeatureSet | None = None  # None: the program takes tensors
    arguments: tuple[str, ...] = ()  # the feature of each argument
    dense: DenseVersion | None = None


class ServedModel(Closing):
    """A published model that is called with raw ids. Thread-safe; close it, or use it in a ``with`` statement.

    Its lookups read from the serving processes, in the version that the program belongs to. Table names are bound in
    the whole process, so a process can have one served model of a namespace at a time.

    Args:
        client: the client of the serving processes, which the caller closes.
        root: the folder of published models that holds the program, by path or URL.
        deadline_ms: the deadline of each lookup, in milliseconds.
        refresh_sec: the pause between two calls of :meth:`refresh` that the model makes itself, in seconds;
            it has to be less than the ``--grace`` of the serving processes (30 s). None: it makes none, and stays with
            its version for as long as that is served.
        cache: the options of a cache of rows in this process, on the device where there is one; None: every lookup asks
            the serving processes.
        device: the device of the program; arguments may be on the host, and cross in one copy. None: the host.

    Raises:
        NotFound: the version was published without a program.
        DataLoss: the program is damaged.
        FailedPrecondition: a table of that name is bound in this process already; or there is a verification key, and
            no trusted publisher signed the version as it is, or its newest dense weights.
        InvalidArgument: a value is out of range, or this machine has no such device; for a cache that is too small, the
            text has the least capacity.
    """

    def __init__(
        self,
        client: ServingClient,
        root: str,
        *,
        deadline_ms: int = _DEADLINE_MS,
        refresh_sec: float | None = _REFRESH_SEC,
        cache: LookupCache | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(client, ServingClient):
            raise not_allowed("ServedModel.client: type", type(client).__name__, "sr.ServingClient")
        if cache is not None and not isinstance(cache, LookupCache):
            raise not_allowed("ServedModel.cache: type", type(cache).__name__, "sr.LookupCache, None")
        check_integer("ServedModel.deadline_ms", deadline_ms, 1)
        if refresh_sec is not None:
            check_number("ServedModel.refresh_sec", refresh_sec)
        self._device = torch.device("cpu" if device is None else device)
        if self._device.type != "cpu":
            try:
                link_of(self._device)
            except ValueError as error:
                raise InvalidArgument(f"ServedModel.{error}") from None
        self._client = client
        self._root = root
        self._deadline_ms = deadline_ms
        self._cache = cache
        self._lock = threading.Lock()
        self._gate = CallGate()  # the names of tables are bound in the whole process, so no call may see them change
        self._closed = False
        self._loaded: _Loaded
        self._load(None)
        self._ended = threading.Event()
        self._refreshes: threading.Thread | None = None
        if refresh_sec is not None:
            self._refreshes = threading.Thread(
                target=_keep_fresh,
                args=(weakref.ref(self), self._ended, refresh_sec),
                name="sparserow-served-model",
                daemon=True,
            )
            self._refreshes.start()

    def close(self) -> None:
        """Unbinds the tables' names in this process, when the last call has returned."""
        self._ended.set()
        with self._lock, self._gate.change():
            self._closed = True
            self._loaded.session.close()
        if self._refreshes is not None:
            self._refreshes.join()

    def _refresh_quietly(self, said: str) -> str:
        """Refreshes, and returns what the log says; ``said`` is what it said before, and is not said again."""
        try:
            self.refresh()
            return ""
        except Exception as error:  # of torch too; the version in use stays
            if not self._closed and str(error) != said:
                _log.warning("%s: version %d stays: %s", self._client.model, self._loaded.version, error)
            return str(error)

    @property
    def version(self) -> int:
        """The version of the model that is in use."""
        return self._loaded.version

    @property
    def dense_version(self) -> int:
        """The number of the dense weights in use, from 1 within the version; 0: those of its program."""
        return self._loaded.dense.number if self._loaded.dense is not None else 0

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._client.model

    def stats(self) -> ServedModelStats:
        """Returns the counters since the version in use was loaded; :class:`ServedModelMetrics` exports them."""
        loaded = self._loaded
        session = loaded.session.stats()
        cache = {"hits": 0, "misses": 0, "hit_age_ms": 0} if loaded.cache is None else loaded.cache.stats()
        return ServedModelStats(
            version=loaded.version,
            dense_version=self.dense_version,
            pulls=session["pulls"],
            cache_hits=cache["hits"],
            cache_misses=cache["misses"],
            cache_hit_age_seconds=cache["hit_age_ms"] / 1000,
        )

    def refresh(self) -> int:
        """Loads the version that the alias names now, or the newest dense weights of the version in use.

        The model calls it itself each ``refresh_sec``; a call is for what must be there now.
        It also connects to other replicas when processes came or went. Calls under way finish with the former version,
        and calls that begin meanwhile wait for them.

        Returns:
            The version in use.

        Raises:
            NotFound, DataLoss: the new version or weights cannot be loaded; those in use stay.
            FailedPrecondition: the model is closed; or another session has bound a table that only the new version
                has, or no trusted publisher signed the new version or weights, and those in use stay.
        """
        with self._lock:
            if self._closed:
                raise FailedPrecondition("ServedModel: the model is closed")
            loaded = self._loaded
            if self._client.version != loaded.version or self._client.generation != loaded.generation:
                self._load(loaded)
            elif newest_number(self._folder(loaded.version)) > self.dense_version:
                self._loaded = self._with_newest_dense(loaded)
            return self._loaded.version

    @property
    def inputs(self) -> tuple[ProgramInput, ...]:
        """The program's arguments, in order."""
        return inputs_of(self._loaded.program)

    def __call__(self, *arguments: Any) -> Any:
        """Returns the output of the model's forward, in eval mode.

        Args:
            arguments: the arguments of the forward; see :attr:`inputs`. Of a version with features it may be one
                table, record batch or mapping with the columns :attr:`columns`.

        Raises:
            InvalidArgument: the arguments are not those that the program takes, an id is out of range, or a column is
                missing or does not fit.
            Unavailable, DeadlineExceeded: a serving shard does not answer.
            FailedPrecondition: the model is closed.
        """
        return self.predict(*arguments).output

    def predict(self, *arguments: Any) -> Prediction:
        """Returns the output of the model's forward with the versions that produced it; see :meth:`__call__`."""
        with self._gate.call():
            if self._closed:
                raise FailedPrecondition("ServedModel: the model is closed")
            loaded = self._loaded
            if len(arguments) == 1 and is_of_columns(arguments[0]):
                arguments = self._of_columns(loaded, arguments[0])
            try:
                with torch.no_grad():
                    output = self._run(loaded, arguments)
            except Exception as error:  # torch has errors of many kinds; what it was given is looked at here alone
                raise error_of_call(loaded.program, arguments, error) from None
        dense = loaded.dense
        if dense is None:
            return Prediction(output, loaded.version, 0, None)
        return Prediction(output, loaded.version, dense.number, dense.step)

    @staticmethod
    def _of_columns(loaded: _Loaded, columns: Any) -> tuple[Any, ...]:
        if loaded.features is None:
            raise FailedPrecondition(
                f"ServedModel: version {loaded.version} was published without features, so its program takes tensors"
            )
        return arguments_of(loaded.features, loaded.arguments, columns)

    def _run(self, loaded: _Loaded, arguments: tuple[Any, ...]) -> Any:
        if loaded.on_device is None:
            return loaded.module(*arguments)
        try:
            there, computed = sent_arguments(arguments, loaded.on_device, self._device, loaded.ids_ahead)
            with IdsAhead.given(computed):
                return loaded.module(*there)
        finally:
            loaded.on_device.end_evaluation()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a version with features reads; () of a version whose program takes tensors."""
        features = self._loaded.features
        return () if features is None else features.columns

    @property
    def features(self) -> FeatureSet | None:
        """The features of the version in use; None when its program takes tensors."""
        return self._loaded.features

    def _folder(self, version: int) -> Folder:
        return ModelRegistry(self._root).folder(self._client.model, version)

    def _load(self, before: _Loaded | None) -> None:
        """Loads the version that the alias names, binds the tables' names to it in place of ``before``, and uses it."""
        generation = self._client.generation
        shards, version, shapes = self._client.shards()
        manifest = ModelRegistry(self._root).trusted_manifest(self._client.model, version, self._keys())
        if before is not None and before.version == version:
            program, ids_ahead = before.program, before.ids_ahead
        else:
            program, ids_ahead = self._program(manifest)
        tables = {f"{manifest.namespace}/{name}": shape for name, shape in shapes.items()}
        on_host = None if self._device.type != "cpu" else self._cache_on_host(shards, shapes)
        session = _client.NativeSession(
            on_host if on_host is not None else shards,
            first_step=0,
            first_sequence=1,
            clocked=False,
            grad_sum=False,
            deadline_ms=self._deadline_ms,
        )
        on_device = None if self._device.type == "cpu" else StepOnDevice(session)
        if on_device is not None:
            on_device.cache = self._cache_on_device({name: shape.dim for name, shape in tables.items()}, before)
        features, arguments = features_of_version(self._folder(version), manifest.features)
        loaded = _Loaded(
            version,
            session,
            on_host if on_device is None else on_device.cache,
            program,
            _module_of(program, ids_ahead),
            generation,
            frozenset(tables),
            on_device,
            ids_ahead,
            features,
            arguments,
        )
        if newest_number(self._folder(version)):
            loaded = self._with_newest_dense(loaded)
        with self._gate.change():
            kept = frozenset() if before is None else before.names
            try:
                _bind(loaded, {name: shape for name, shape in tables.items() if name not in kept})
            except BaseException:  # another session has a name: the former version keeps its own and goes on
                session.close()
                raise
            if before is not None:
                before.session.close()
                if isinstance(loaded.cache, DeviceCache):
                    loaded.cache.forget()
            _bind(loaded, {name: shape for name, shape in tables.items() if name in kept})
            self._loaded = loaded

    def _cache_on_host(
        self, shards: _client.LookupShards, shapes: dict[str, TableShape]
    ) -> _client.CachedLookups | None:
        if self._cache is None:
            return None
        dims = [(shape.id, shape.dim) for shape in shapes.values()]
        size, ttl_ms = self._cache.capacity_bytes, self._cache.ttl_ms
        return _client.CachedLookups(shards, dims, capacity_bytes=size, ttl_ms=ttl_ms)

    def _cache_on_device(self, tables: dict[str, int], before: _Loaded | None) -> DeviceCache | None:
        """That of the version before where tables are the same, so that the device need not hold two."""
        if self._cache is None:
            return None
        if before is not None and isinstance(before.cache, DeviceCache) and before.cache.tables == tables:
            return before.cache
        size = CacheSize(self._cache.capacity_bytes, self._cache.ttl_ms)
        try:
            return DeviceCache(tables, size, link_of(self._device))
        except ValueError as error:
            raise InvalidArgument(str(error)) from None

    def _keys(self) -> Security:
        return trusted_keys(self._client.security)

    def _program(self, manifest: ModelManifest) -> tuple[torch.export.ExportedProgram, IdsAhead | None]:
        """The program on the model's device, and what computes its ids on the host where that is another one."""
        program = exported_program(self._folder(manifest.version), manifest, self._keys())
        for name, constant in program.constants.items():  # the anchors, which make autograd record lookups
            if isinstance(constant, torch.Tensor):
                program.constants[name] = constant.detach()
        if self._device.type == "cpu":
            return program, None
        ids_ahead = IdsAhead(program.module())
        return move_to_device_pass(program, self._device), ids_ahead if ids_ahead else None

    def _with_newest_dense(self, loaded: _Loaded) -> _Loaded:
        folder = self._folder(loaded.version)
        check = check_dense(self._client.model, loaded.version, self._keys())
        dense, data = read_dense(folder, newest_number(folder), check)
        weights = decode_tree(data, f"{folder.url}: dense weights {dense.number}", tensor_of)
        module = _module_of(loaded.program, loaded.ids_ahead)
        present = module.state_dict()
        if {key: value.shape for key, value in weights.items()} != {key: value.shape for key, value in present.items()}:
            raise DataLoss(f"{folder.url}: dense weights {dense.number} do not match those of the program")
        module.load_state_dict({key: value.to(present[key]) for key, value in weights.items()}, assign=True)
        return dataclasses.replace(loaded, module=module, dense=dense)


def _module_of(program: torch.export.ExportedProgram, ids_ahead: IdsAhead | None) -> torch.fx.GraphModule:
    module = program.module()
    return module if ids_ahead is None else ids_ahead.on_device(module)


def _bind(loaded: _Loaded, tables: dict[str, TableShape]) -> None:
    """Binds names of tables in this process to the session of a version."""
    for name, shape in tables.items():
        loaded.session.bind(
            name, table_id=shape.id, schema_version=shape.schema_version, dim=shape.dim, num_rows=0, lr=0.0
        )
        if loaded.on_device is not None:
            register(name, loaded.on_device)


def _keep_fresh(model: weakref.ref[ServedModel], ended: threading.Event, pause_sec: float) -> None:
    """Refreshes a model until it is closed, or nobody has it any more."""
    said = ""
    while not ended.wait(pause_sec):
        one = model()
        if one is None:
            return
        said = one._refresh_quietly(said)
        del one
