"""The buffers of a model whose dense tensors are on the servers: a worker that begins, or comes later, has rank 0's.

Each worker moves its own in training, as in torch. Rank 0, which evaluates and publishes, writes its buffers to a file
of the namespace, about once a second and when it ends. So whoever takes its place has the means of the batches before.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ...cpp_ext.torch_arrays import SAFETENSORS_NAMES
from ...proto.checkpoint.folder import bytes_of
from ...proto.checkpoint.tensor_file import Tensor as FileTensor, decode, encode
from ...proto.errors import FailedPrecondition, SparserowError
from ...proto.names import buffers_table
from ..session.compiled_module import plain_path
from ..session.namespace_file import NamespaceFile

if TYPE_CHECKING:
    from ..session.session import JobSession

_log = logging.getLogger(__name__)
_EVERY_SEC = 1.0
# numpy, by which they are written, has no bfloat16.
_NAMES = {dtype: name for dtype, name in SAFETENSORS_NAMES.items() if dtype is not torch.bfloat16}


class SharedBuffers:
    """The persistent buffers of a model, and their file.

    Args:
        model: the model.
        session: the session of the job.
        dense: the name of the table with the model's parameters.
    """

    def __init__(self, model: nn.Module, session: JobSession, dense: str) -> None:
        self._buffers = _persistent(model)
        self._session = session
        self._file = NamespaceFile(session.core, buffers_table(dense))
        self._written_at = time.monotonic()
        if self._buffers:
            session.core.follow(self)

    def read(self) -> None:
        """Sets the buffers to those of the file.

        Raises:
            FailedPrecondition: there is no file, or it has the buffers of another model.
        """
        if not self._buffers:
            return
        data = self._file.read()
        if data is None:
            raise FailedPrecondition(
                f"dense_on_servers: the servers have the parameters of this model and not its buffers "
                f"({', '.join(list(self._buffers)[:3])}), so they would begin anew; restore a checkpoint with them, or "
                "drop the tables of the model"
            )
        _, tensors = decode(memoryview(data), self._file.where)
        mine = {name: (_NAMES[buffer.dtype], tuple(buffer.shape)) for name, buffer in self._buffers.items()}
        there = {name: (each.dtype, tuple(each.values.shape)) for name, each in tensors.items()}
        if mine != there:
            other = next(name for name in [*mine, *there] if mine.get(name) != there.get(name))
            raise FailedPrecondition(
                f"dense_on_servers: {self._file.where} has the buffers of another model: {other!r} is "
                f"{there.get(other, 'not there')}, and {mine.get(other, 'not there')} in this one; drop the table, or "
                "use another namespace"
            )
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                buffer.copy_(torch.from_numpy(np.array(tensors[name].values)))

    def write(self) -> None:
        """Writes the buffers to the file."""
        if not self._buffers:
            return
        named = {name: FileTensor(_NAMES[each.dtype], each.detach().numpy()) for name, each in self._buffers.items()}
        self._file.write(b"".join(bytes_of(piece) for piece in encode(named, {}).pieces))
        self._written_at = time.monotonic()

    def after_step(self) -> None:
        """Writes the buffers of rank 0 where the last time is a second ago."""
        if time.monotonic() - self._written_at >= _EVERY_SEC:
            self.close()

    def close(self) -> None:
        """Writes the buffers of rank 0, as before its session is closed; where it cannot, a line says so.

        The step is done by then, so it does not fail for them.
        """
        if not self._buffers or self._session.rank != 0:
            return
        try:
            self.write()
        except SparserowError as error:
            self._written_at = time.monotonic()  # tried again in a second
            _log.warning("dense_on_servers: the newest buffers were not written: %s", error)


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set or not buffer.numel():
                continue
            full = plain_path(f"{path}.{name}" if path else name)
            if buffer.dtype not in _NAMES or buffer.device.type != "cpu":
                allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
                raise FailedPrecondition(
                    f"dense_on_servers: buffer {full!r} is {buffer.dtype} on {buffer.device.type}; allowed: {allowed} "
                    "on cpu"
                )
            found[full] = buffer
    return found
