"""Paddle's parameter server (brpc): ``MemorySparseTable``, which is a hash of rows, with Adagrad.

``pull`` is the part of a program that reads the rows of the batch. ``step`` is the whole program: forward, backward and
a push. A push goes to a queue, from which a thread of the client sends two or more at once. The queue is short here, so
that steps wait for the pushes before, and several steps are timed together; else the time would be that of the queue.
Each dim has a server and a client of its own, since a process has one program for a server.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .worker import Tools

_CLIENT_SEC = 600.0
_FILL = 50_000  # rows of a pull that creates them
_LARGEST_MESSAGE = 1 << 30  # brpc refuses larger ones, and the pushes in them are lost; its default is 64 MiB
_QUEUE = 1  # pushes that may wait for others; the default is 13
_STEPS = 4  # steps that are timed together
_APPLIED_SEC = 30.0
_COUNTS = ("shows", "clicks")  # the server divides gradients by the shows of a row
_FLAGS = "_ZN6paddle11distributed12paddle_flags"  # flags that Paddle reads from no environment variable


def measure(asked: dict[str, Any], tools: Tools) -> None:
    """Runs a server and a client for each dim, one after the other."""
    tools.note_versions("paddlepaddle")
    for dim in tools.dims():
        ports = {"port": _free_port(), "trainer_port": _free_port()}
        works = [work for work in asked["works"] if work.endswith(f" {dim}")]
        tools.start("serve", works=works, **ports)
        tools.seconds.update(json.loads(tools.start("client", _CLIENT_SEC, works=works, **ports)))
        tools.stop()


def serve(asked: dict[str, Any], tools: Tools) -> None:
    """Runs a server until the process is killed."""
    _set_environment("PSERVER", asked)
    _, parameter_server, *_ = _program(asked, tools)
    parameter_server.init_server()
    tools.ready("started")
    parameter_server.run_server()


def client(asked: dict[str, Any], tools: Tools) -> None:
    """Creates all rows, and measures the works of one dim; writes their seconds."""
    _set_environment("TRAINER", asked)
    paddle, parameter_server, loss = _program(asked, tools)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    parameter_server.init_worker()
    main = paddle.static.default_main_program()
    reader, rows = _reading_part(main)
    (dim,) = tools.dims()
    batches = tools.batches()
    factors = tools.grads(dim)
    fixed = {"factors": factors, **{name: np.ones((asked["keys"], 1), np.float32) for name in _COUNTS}}

    def pull(keys: Any) -> Any:
        return executor.run(reader, feed={"keys": keys[:, None], **fixed}, fetch_list=[rows])[0]

    def step(keys: Any) -> None:
        executor.run(main, feed={"keys": keys[:, None], **fixed}, fetch_list=[loss])

    def steps(several: list[Any]) -> None:
        for each in several:
            step(each)

    for begin in range(0, asked["rows"], _FILL):
        pull(np.arange(begin, min(begin + _FILL, asked["rows"]), dtype=np.int64))
    tools.time("pull", dim, batches.__next__, pull)
    tools.time("step", dim, lambda: [next(batches) for _ in range(_STEPS)], steps, batches=_STEPS)
    if tools.has("step", dim):
        keys = np.random.default_rng(9).choice(asked["rows"], asked["keys"], replace=False)
        before = pull(keys)
        step(keys)
        _wait_until_changed(lambda: pull(keys), before, lambda: step(next(batches)))
    tools.ready(json.dumps(tools.seconds))


def _wait_until_changed(pull: Any, before: Any, push_others: Any) -> None:
    """Waits until each row has changed; pushes others meanwhile, since the last pushes wait in the queue for more.

    Raises:
        RuntimeError: some have not after half a minute, because their push was lost.
    """
    deadline = time.monotonic() + _APPLIED_SEC
    while True:
        left = int((pull() == before).reshape(len(before), -1).all(axis=1).sum())
        if left == 0:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{left:,} of {len(before):,} rows are as before their push")
        push_others()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _set_environment(role: str, asked: dict[str, Any]) -> None:
    """Sets what Paddle reads about the processes, and the limits of the client's queue and of messages."""
    os.environ.update(
        TRAINING_ROLE=role,
        PADDLE_PSERVERS_IP_PORT_LIST=f"127.0.0.1:{asked['port']}",
        PADDLE_TRAINERS_NUM="1",
        PADDLE_TRAINER_ENDPOINTS=f"127.0.0.1:{asked['trainer_port']}",
        PADDLE_TRAINER_ID="0",
        POD_IP="127.0.0.1",
        PADDLE_PORT=str(asked["port"]),
    )
    from paddle.base import core

    library = ctypes.CDLL(core.libpaddle.__file__)
    ctypes.c_int32.in_dll(library, f"{_FLAGS}32FLAGS_pserver_max_async_call_numE").value = _QUEUE
    ctypes.c_uint64.in_dll(library, "_ZN4brpc5fLU6419FLAGS_max_body_sizeE").value = _LARGEST_MESSAGE


def _program(asked: dict[str, Any], tools: Tools) -> tuple[Any, Any, Any]:
    """Builds the program of both roles; returns Paddle, its servers' interface and the loss."""
    import paddle
    import paddle.distributed.fleet as parameter_server

    paddle.enable_static()
    parameter_server.init(parameter_server.PaddleCloudRoleMaker(is_collective=False))
    (dim,) = tools.dims()
    keys = paddle.static.data("keys", [-1, 1], "int64")
    factors = paddle.static.data("factors", [-1, dim], "float32")
    for name in _COUNTS:
        paddle.static.data(name, [-1, 1], "float32")
    rows = paddle.static.nn.sparse_embedding(
        keys,
        size=[asked["rows"], dim],
        entry=paddle.distributed.ShowClickEntry(*_COUNTS),
        param_attr=paddle.ParamAttr(name="rows"),
    )
    loss = paddle.sum(paddle.reshape(rows, [-1, dim]) * factors)
    strategy = parameter_server.DistributedStrategy()
    strategy.a_sync = True
    strategy.fleet_desc_configs = {
        "use_cvm": False,
        "rows": {
            "sparse_embedx_dim": dim - 1,
            "sparse_embedx_threshold": 0,
            "sparse_optimizer": "std_adagrad",  # a sum for each column
            "sparse_learning_rate": 0.01,
            "sparse_weight_bounds": [-1e9, 1e9],  # rows at the default of 10 do not change
        },
    }
    parameter_server.distributed_optimizer(paddle.optimizer.SGD(0.01), strategy).minimize(loss)  # the table has its own
    return paddle, parameter_server, loss


def _reading_part(main: Any) -> tuple[Any, Any]:
    """Returns the program up to the operator that reads rows, and what that operator gives."""
    reader = main.clone()
    block = reader.global_block()
    kinds = [operator.type for operator in block.ops]
    last = kinds.index("distributed_lookup_table")
    for index in reversed(range(last + 1, len(kinds))):
        block._remove_op(index)
    return reader, block.var(block.ops[last].output("Outputs")[0])
