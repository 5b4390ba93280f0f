"""Inference with a published model: its exported program, with rows read from the serving processes."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from ..cpp_ext import _client
from ..proto.errors import FailedPrecondition, InvalidArgument
from ..serving.client import ServingClient
from ..serving.registry import ModelRegistry
from ..worker import ops
from .publishing import load_program

_DEADLINE_MS = 1000


@dataclass(frozen=True)
class ProgramInput:
    """An argument of a program: its name, dtype, and shape; None is a dimension that varies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]


class ServedModel:
    """A published model that is called with raw ids. Close it, or use it in a ``with`` statement.

    Its lookups are ops that read from the serving processes, of the version that the program belongs to. Names of
    tables are bound in the whole process, so a process has one served model of a namespace at a time. Thread-safe.

    Args:
        client: of the serving processes; stays the caller's.
        root: folder of published models, where the program lies.
        deadline_ms: of each lookup.

    Raises:
        NotFound: the version was published without a program.
        DataLoss: the program is damaged.
        FailedPrecondition: a table of that name is bound in this process already.
    """

    def __init__(self, client: ServingClient, root: str, *, deadline_ms: int = _DEADLINE_MS) -> None:
        if deadline_ms < 1:
            raise InvalidArgument(f"ServedModel: deadline_ms {deadline_ms} is not allowed; allowed: >= 1")
        self._client = client
        self._root = root
        self._deadline_ms = deadline_ms
        self._lock = threading.Lock()
        self._session: _client.NativeSession | None = None
        self.version = 0
        self._load()

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the tables' names free."""
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None

    def refresh(self) -> int:
        """Takes over the version that the alias names now, and returns it; calls under way end as they began."""
        if self._client.version != self.version:
            self._load()
        return self.version

    @property
    def inputs(self) -> tuple[ProgramInput, ...]:
        """The program's arguments, in order."""
        placeholders = {node.name: node.meta["val"] for node in self._program.graph.nodes if node.op == "placeholder"}
        names = [name for name in self._program.graph_signature.user_inputs if isinstance(name, str)]
        return tuple(
            ProgramInput(name, value.dtype, tuple(d if isinstance(d, int) else None for d in value.shape))
            for name in names
            if isinstance(value := placeholders[name], torch.Tensor)
        )

    def __call__(self, *arguments: Any) -> Any:
        """What the model's forward gives, in eval mode.

        Raises:
            InvalidArgument: an id is out of range.
            Unavailable, DeadlineExceeded: a serving shard does not answer.
            FailedPrecondition: it is closed.
        """
        if self._session is None:
            raise FailedPrecondition("ServedModel: it is closed")
        try:
            with torch.no_grad():
                return self._module(*arguments)
        except (RuntimeError, ValueError) as error:
            raise ops.typed_error(error) from None

    def _load(self) -> None:
        shards, version, shapes = self._client.shards()
        manifest = ModelRegistry(self._root).manifest(self._client.model, version)
        program = torch.export.load(io.BytesIO(load_program(self._root, self._client.model, version)))
        for name, constant in program.constants.items():  # what makes autograd record a lookup has no use here
            if isinstance(constant, torch.Tensor):
                program.constants[name] = constant.detach()
        session = _client.NativeSession(
            shards, first_step=0, first_sequence=1, clocked=False, grad_sum=False, deadline_ms=self._deadline_ms
        )
        with self._lock:
            if self._session is not None:
                self._session.close()  # its names are taken over
            for name, shape in shapes.items():
                session.bind(
                    f"{manifest.namespace}/{name}",
                    table_id=shape.id,
                    schema_version=shape.schema_version,
                    dim=shape.dim,
                    num_rows=0,
                    lr=0.0,
                )
            self._session, self._program, self._module = session, program, program.module()
            self.version = version
