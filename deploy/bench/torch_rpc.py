"""The competitor that torch itself provides: ``torch.distributed.rpc`` before a plain matrix, in its own process.

Rows are read by ``index_select``, and written by an Adagrad of indexed tensor operations. So there is no hashing, no
admission of new keys and no exactly-once. TensorPipe moves tensors between processes of one machine through shared
memory.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.distributed import rpc

from .processes import other_process

__all__ = ["TorchRpc", "torch_rpc"]

_EPS = 1e-10
_held: dict[int, tuple[Tensor, Tensor]] = {}  # in the server process: weights and sums, by dim


def _hold(dim: int, rows: int) -> None:
    _held[dim] = (torch.full((rows, dim), 0.01), torch.zeros(rows, dim))


def _pull(dim: int, rows: Tensor) -> Tensor:
    return _held[dim][0].index_select(0, rows)


def _push(dim: int, rows: Tensor, grads: Tensor, lr: float) -> None:
    weights, sums = _held[dim]
    sum_of_rows = sums.index_select(0, rows).addcmul_(grads, grads)
    sums.index_copy_(0, rows, sum_of_rows)
    weights.index_add_(0, rows, grads.div(sum_of_rows.sqrt_().add_(_EPS)), alpha=-lr)


def _join(name: str, rank: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def _serve(parent: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    parent.send(port)
    _join("server", 0, port)
    rpc.shutdown()  # waits for the shutdown of the other side


class TorchRpc:
    """Pulls and pushes rows of a plain matrix by torch RPC; ``hold`` has to be called for a dim first."""

    def hold(self, dim: int, rows: int) -> None:
        """Creates the matrices of ``dim`` columns."""
        rpc.rpc_sync("server", _hold, args=(dim, rows))

    def pull(self, dim: int, rows: Tensor) -> Tensor:
        """Returns (n, dim) float32 of ``rows`` (n) int64."""
        pulled: Tensor = rpc.rpc_sync("server", _pull, args=(dim, rows))
        return pulled

    def push(self, dim: int, rows: Tensor, grads: Tensor, lr: float) -> None:
        """Applies gradients ``grads`` (n, dim) float32 to ``rows`` (n) int64, which are unique."""
        rpc.rpc_sync("server", _push, args=(dim, rows, grads, lr))


@contextmanager
def torch_rpc(dims: Sequence[int], rows: int) -> Iterator[TorchRpc]:
    """Runs a server process with ``rows`` rows of each dim, and this process as its client."""
    with other_process(_serve, ()) as port:
        _join("client", 1, port)
        try:
            client = TorchRpc()
            for dim in dims:
                client.hold(dim, rows)
            yield client
        finally:
            rpc.shutdown()
