"""The competitor that torch itself provides: ``torch.distributed.rpc`` before a plain matrix, in its own process.

Rows are read by ``index_select``, and written by an Adagrad of indexed tensor operations. So there is no hashing, no
admission of new keys and no exactly-once. TensorPipe moves tensors between processes of one machine through shared
memory unless it is set to use TCP.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc

from .harness import Contender, time_in_turns
from .processes import other_process, spawned

__all__ = ["TRANSPORTS", "TorchRpc", "torch_rpc"]

TRANSPORTS = {"TCP": ["uv"], "shared memory": ["shm", "uv"]}  # TensorPipe's names, the preferred one first
_EPS = 1e-10
_BATCHES, _DEADLINE_SEC = 30, 120.0
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


def _join(name: str, rank: int, port: int, transport: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", _transports=TRANSPORTS[transport])
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def _serve(parent: Connection, transport: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    parent.send(port)
    _join("server", 0, port, transport)
    rpc.shutdown()  # waits for the shutdown of the other side


def _measure(parent: Connection, port: int, dims: Sequence[int], rows: int, keys: int, transport: str) -> None:
    """The client process: answers each (what, dim, repetitions) by the seconds of so many calls; None ends it."""
    _join("client", 1, port, transport)
    random = np.random.default_rng(7)
    batches = cycle([torch.from_numpy(random.choice(rows, keys, replace=False)) for _ in range(_BATCHES)])
    grads = {dim: torch.from_numpy(random.normal(size=(keys, dim)).astype(np.float32)) for dim in dims}
    for dim in dims:
        rpc.rpc_sync("server", _hold, args=(dim, rows))
    parent.send(0)
    while (asked := parent.recv()) is not None:
        what, dim, repetitions = asked

        def call(ids: Tensor, what: str = what, dim: int = dim) -> None:
            if what == "pull":
                rpc.rpc_sync("server", _pull, (dim, ids))
            else:
                rpc.rpc_sync("server", _push, (dim, ids, grads[dim], 0.01))

        timed = [Contender(what, batches.__next__, call)]
        parent.send(time_in_turns(timed, repetitions=repetitions)[0])
    rpc.shutdown()


class TorchRpc:
    """Pulls and pushes rows of a plain matrix by torch RPC, between two processes of its own."""

    def __init__(self, client: Connection) -> None:
        self._client = client

    def seconds(self, what: str, dim: int, repetitions: int) -> list[float]:
        """Returns the seconds of so many calls of ``what``: pull or push.

        Raises:
            TimeoutError: there is no answer within two minutes.
        """
        self._client.send((what, dim, repetitions))
        return list(_received(self._client))


def _received(client: Connection) -> Any:
    if not client.poll(_DEADLINE_SEC):
        raise TimeoutError(f"the client of torch RPC did not answer within {_DEADLINE_SEC:.0f} s")
    return client.recv()


@contextmanager
def torch_rpc(dims: Sequence[int], rows: int, keys: int, transport: str) -> Iterator[TorchRpc]:
    """Runs a server process with ``rows`` rows of each dim, and a client process.

    Args:
        dims: the numbers of columns.
        rows: the number of rows.
        keys: the number of rows of a call.
        transport: a name in ``TRANSPORTS``.
    """
    measure = (dims, rows, keys, transport)
    with other_process(_serve, (transport,)) as port, spawned(_measure, (port, *measure)) as client:
        _received(client)
        yield TorchRpc(client)
        client.send(None)
