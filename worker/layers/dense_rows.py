"""``dense_on_servers``: keeps a model's dense tensors as rows of a table, so that workers need no process group.

    forward (train) ── pull of the step ──> parameters      backward ──> .grad ── session.step ── the same commit

A row is 64 consecutive values of one flattened tensor; the last row of a tensor is padded with zeros. The row of
``MARKER_KEY`` marks that the initial values were written, and identifies their model.

Invariants:
 1. Parameters change only at the first forward of a step, so activation recomputation and micro-batches agree.
 2. A tensor without a gradient sends nothing in that step, as torch's optimizers do not change such a tensor.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...cpp_ext import torch_ops as ops
from ...proto.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, typed_error
from ...proto.optim import RowOptimizer
from ...proto.schema import Constant, TableSchema
from ..session.compiled_module import plain_path
from ..session.row_optimizers import OptimizerLike, row_optimizer_of
from ..session.session import JobSession
from ..session.table import KeyedRows
from .shared_buffers import SharedBuffers

ROW_WIDTH = 64
MARKER_KEY = 2**63 - 1
_POLL_SEC = 0.02
_LOOK_SEC = 0.5  # the pause between two requests for the job's members


@dataclass
class _ParameterRows:
    """The rows of a parameter: those of ids in [begin, end)."""

    name: str
    parameter: nn.Parameter
    begin: int
    end: int
    _seen: tuple[int, int] = (0, 0)  # its version and its memory, as the servers' values were copied into it

    def set(self, rows: Tensor) -> None:
        flat = rows[self.begin : self.end].view(-1)[: self.parameter.numel()]
        self.parameter.copy_(flat.view(self.parameter.shape))
        self.see()

    def see(self) -> None:
        self._seen = self._state

    @property
    def is_changed(self) -> bool:
        return self._state != self._seen

    @property
    def _state(self) -> tuple[int, int]:
        return self.parameter._version, self.parameter.data_ptr()


def dense_on_servers(
    session: JobSession, model: nn.Module, *, optimizer: OptimizerLike, table: str = "dense", wait_sec: float = 60.0
) -> DenseRows:
    """Moves the parameters that a distributed model still has to the parameter servers, in place.

    Call it on every worker after :meth:`distribute`, instead of ``DistributedDataParallel`` and a local optimizer; no
    process group is needed. From then on the first forward of a step in train mode reads the parameters under the
    job's clock. A forward in eval mode reads the newest parameters. ``session.step()`` sends their gradients. Each
    worker moves its own buffers, as those of BatchNorm; it begins with those of rank 0, which writes them about once a
    second to a file of the namespace. A parameter that is frozen later sends none, and one that is frozen now stays in
    each worker: a forward refuses to train it. A forward also refuses a parameter that something else has changed since
    the last one, such as ``load_state_dict`` or a local optimizer, because its values are those of the servers.

    Args:
        model: the model; its parameters must be float32 on the CPU.
        optimizer: the optimizer of the parameters, which the servers run. Its learning rate is in
            ``session.optimizer``.
        table: the table's name in the session's namespace.
        wait_sec: how long other ranks wait for the initial values, in seconds. When a rank dies before it has written
            them, the next rank writes them after the lease of the dead one has ended.

    Returns:
        The rows of the parameters. Only a caller that compiles the model needs its :meth:`DenseRows.pull`.

    Raises:
        InvalidArgument: the model has no parameter, or a parameter that is not float32 on the CPU; the text names it.
        FailedPrecondition: the model is wrapped in DDP, its dense tensors are on the servers already, or the table
            holds the parameters of another model, or its buffers are not there.
        DeadlineExceeded: no worker has written the initial values within ``wait_sec``.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise FailedPrecondition(
            "dense_on_servers: the model is in DistributedDataParallel, which reduces gradients; pass the inner model"
        )
    session.core.check_no_dense_rows()
    session.core.check_no_device_tables()
    dense = DenseRows(model, session, row_optimizer_of(optimizer, "dense_on_servers.optimizer"), table)
    dense.take_initial_values(wait_sec)
    session.core.attach_dense_rows(dense)
    # Marked here, as the mark imports Dynamo, which takes a second.
    model.register_forward_pre_hook(torch.compiler.disable(dense.before_forward), prepend=True)
    return dense


class DenseRows:
    """Moves the parameters of one model between their table and the model. :func:`dense_on_servers` makes it.

    Args:
        model: the model.
        session: the session of the job.
        optimizer: the row optimizer of the table.
        table: the table's name in the session's namespace.

    Raises:
        InvalidArgument: the model has no parameter, or one that is not float32 on the CPU.
        FailedPrecondition: the table exists with another schema.
    """

    def __init__(self, model: nn.Module, session: JobSession, optimizer: RowOptimizer, table: str) -> None:
        every = [(plain_path(name), p) for name, p in model.named_parameters() if p.numel() > 0]
        named = [(name, p) for name, p in every if p.requires_grad]
        self._local = [(name, p) for name, p in every if not p.requires_grad]
        if not named:
            raise InvalidArgument("dense_on_servers: the model has no parameters besides its tables")
        self._places: list[_ParameterRows] = []
        rows = 0
        for name, parameter in named:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                raise InvalidArgument(
                    f"dense_on_servers: parameter {name!r} is {parameter.dtype} on {parameter.device.type}; "
                    "allowed: float32 on cpu"
                )
            end = rows + math.ceil(parameter.numel() / ROW_WIDTH)
            self._places.append(_ParameterRows(name, parameter, rows, end))
            rows = end
        self._layout = _digest(";".join(f"{name}{tuple(p.shape)}" for name, p in named))
        self._ids = torch.arange(rows)
        self._gradients = torch.zeros(rows, ROW_WIDTH)
        self._is_pulled = False  # whether the parameters are those of the current step
        self._is_in_step = False  # whether a forward of the current step has read them
        self._session = session
        self._anchor = torch.zeros(1, requires_grad=True)
        self._buffers = SharedBuffers(model, session, table)
        self._schema = session.core.catalog.create_table(
            TableSchema(session.namespace, table, ROW_WIDTH, optimizer, init=Constant(0.0))
        )
        self._binding = session.core.bind(self._schema, num_rows=rows, anchor=self._anchor, cached=False)

    @property
    def ids(self) -> Tensor:
        """The ids that each forward looks up in the table ``table.schema.name``, (rows) int64."""
        return self._ids

    @property
    def table(self) -> KeyedRows:
        """The rows of the table, by key."""
        return self._session.core.table(self._schema.name)

    @property
    def table_name(self) -> str:
        """The name of the table in the session's namespace."""
        return self._schema.name

    def take_initial_values(self, wait_sec: float) -> None:
        """Waits until the table has initial values, and copies them into the model.

        The worker of the lowest rank in the job writes its model's values to a table that has none.

        Args:
            wait_sec: how long to wait for another worker's values, in seconds.

        Raises:
            FailedPrecondition: the table holds the parameters of another model.
            DeadlineExceeded: no worker has written the values within ``wait_sec``.
        """
        table, marker = self.table, np.array([MARKER_KEY], dtype=np.uint64)
        deadline = time.monotonic() + wait_sec
        looked = -math.inf
        gives = False
        while not (found := table.pull(marker)[0]).any():
            if gives:
                self._buffers.write()
                table.assign(self._ids.numpy(), self._flat_values())
                table.assign(marker, self._layout[None])  # last: a worker that sees the marker finds all values
            elif (now := time.monotonic()) > deadline:
                raise DeadlineExceeded(
                    f"dense_on_servers: no rank before rank {self._session.rank} has given table "
                    f"{self._schema.full_name!r} its initial values in {wait_sec:g} s"
                )
            elif now - looked >= _LOOK_SEC:
                looked = now
                # The loop reads the marker again before it writes, as a worker that has left may have written.
                gives = self._session.core.is_lowest_rank()
            else:
                time.sleep(_POLL_SEC)
        if not np.array_equal(found, self._layout):
            raise FailedPrecondition(
                f"dense_on_servers: table {self._schema.full_name!r} holds the parameters of another model; drop it, "
                "or use another namespace"
            )
        self._set_values(torch.from_numpy(table.pull(self._ids.numpy())))
        self._buffers.read()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Is the hook before a forward: reads the parameters of this step, or in eval mode the newest ones.

        A model that is being exported keeps the parameters that it has.
        """
        del args
        if not torch.compiler.is_compiling():  # else the exported program would contain the pull of the rows
            self.pull(train=module.training)

    def pull(self, *, train: bool = True) -> None:
        """Copies the parameters from the servers into the model.

        Args:
            train: True reads the parameters of the current step, once a step. False reads the newest parameters.

        Raises:
            DeadlineExceeded: other workers are too far behind; the text names them.
            SparserowError: a server cannot answer.
        """
        self._check_unchanged(train=train)
        if train and self._is_pulled:
            return
        if train:
            self._session.core.catch_up()
        try:
            with torch.no_grad():
                rows = ops.gather(self._ids, self._anchor, self._binding, ROW_WIDTH, -1, train)
        except (RuntimeError, ValueError) as error:
            raise typed_error(error) from None
        self._set_values(rows)
        self._is_pulled = train
        self._is_in_step |= train

    def write_buffers(self) -> None:
        """Writes the model's buffers to their file."""
        self._buffers.write()

    def accept_restored(self, *, has_model: bool) -> None:
        """Takes the parameters as they are for those of the servers, after a restore has set these; the next forward
        reads them.

        Args:
            has_model: whether the restore has set the model as well; else its buffers are read here.
        """
        if not has_model:
            self._buffers.read()
        for place in self._places:
            place.see()
        self._is_pulled = False

    def _check_unchanged(self, *, train: bool) -> None:
        changed = next((place.name for place in self._places if place.is_changed), None)
        if changed is not None:
            raise FailedPrecondition(
                f"dense_on_servers: parameter {changed!r} was changed in this process, and its values are those of "
                f"table {self._schema.full_name!r}; load weights before dense_on_servers, in a namespace without that "
                "table, and let no local optimizer step"
            )
        thawed = next((name for name, parameter in self._local if parameter.requires_grad), None) if train else None
        if thawed is not None:
            raise FailedPrecondition(
                f"dense_on_servers: parameter {thawed!r} requires a gradient now and was frozen when dense_on_servers "
                "took the model, so no server has it; let it require one before, and freeze it afterwards"
            )

    @property
    def has_gradients(self) -> bool:
        """Whether backward has brought gradients of a tensor in this step."""
        return self._is_in_step and any(place.parameter.grad is not None for place in self._places)

    def stage(self) -> None:
        """Adds the gradients of backward to the session's step; ``session.step`` calls it first."""
        if not self._is_in_step:
            return
        given = [place for place in self._places if place.parameter.grad is not None]
        for place in given:
            assert place.parameter.grad is not None
            flat = self._gradients[place.begin : place.end].view(-1)
            flat[: place.parameter.numel()] = place.parameter.grad.reshape(-1)
        ids, gradients = self._ids, self._gradients
        if len(given) < len(self._places):
            ids = torch.cat([self._ids[place.begin : place.end] for place in given] or [self._ids[:0]])
            gradients = self._gradients[ids]
        if len(ids):
            with torch.no_grad():
                ops.stage(gradients, ids, self._binding, ROW_WIDTH, -1)

    def end_step(self) -> None:
        """Drops the gradients, so that the next forward reads again; ``session.step`` calls it last."""
        self._is_pulled = self._is_in_step = False
        for place in self._places:
            place.parameter.grad = None
        self._buffers.after_step()

    def _flat_values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        values = torch.zeros(len(self._ids), ROW_WIDTH)
        for place in self._places:
            values[place.begin : place.end].view(-1)[: place.parameter.numel()] = place.parameter.detach().reshape(-1)
        return values.numpy()

    def _set_values(self, rows: Tensor) -> None:
        with torch.no_grad():
            for place in self._places:
                place.set(rows)


def _digest(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns a digest of a text, (ROW_WIDTH) float32: the bytes of its SHA-512, each plus 1 so that none is 0."""
    return np.frombuffer(hashlib.sha512(text.encode()).digest(), dtype=np.uint8).astype(np.float32) + 1
