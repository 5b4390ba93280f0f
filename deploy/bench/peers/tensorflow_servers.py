"""TensorFlow's gRPC parameter server with a plain variable: gather, and Adagrad of rows on the server.

``step`` is gather, forward, backward and Adagrad on the server.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

if TYPE_CHECKING:
    from .worker import Tools

_SERVER = "/job:ps/replica:0/task:0/device:CPU:0"


def serve(_: dict[str, Any], tools: Tools) -> None:
    """Runs a parameter server until the process is killed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = tf.distribute.Server({"ps": [f"127.0.0.1:{port}"]}, job_name="ps", task_index=0)
    tools.ready(port)
    server.join()


def measure(asked: dict[str, Any], tools: Tools) -> None:
    """Measures a variable of each dim on one server."""
    tools.note_versions("tensorflow")
    tf.config.threading.set_intra_op_parallelism_threads(asked["threads"])
    tf.config.experimental_connect_to_host(f"127.0.0.1:{tools.start('serve')}", job_name="ps")
    local = tf.config.list_logical_devices("CPU")[0].name
    batches = tools.batches()
    for dim in tools.dims():
        _measure_dim(dim, asked["rows"], batches, local, tools)


def _measure_dim(dim: int, rows: int, batches: Any, local: str, tools: Tools) -> None:
    with tf.device(_SERVER):
        weights = tf.Variable(tf.fill((rows, dim), 0.01))
        sums = tf.Variable(tf.zeros((rows, dim)))
    given = tf.constant(tools.grads(dim))
    keys_of_batch = tf.TensorSpec((None,), tf.int64)

    def gathered(keys: Any) -> Any:
        with tf.device(_SERVER):
            return tf.gather(weights, keys)

    def applied(keys: Any, grads: Any) -> Any:
        """Updates rows, and returns a key that leaves the server afterwards, so that the caller waits for the end."""
        with tf.device(_SERVER):
            update = tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=weights.handle, accum=sums.handle, lr=0.01, epsilon=1e-10, grad=grads, indices=keys
            )
            with tf.control_dependencies([update]):
                return tf.identity(keys[0])

    @tf.function(input_signature=[keys_of_batch])  # type: ignore[untyped-decorator]
    def pull(keys: Any) -> Any:
        rows_of_keys = gathered(keys)
        with tf.device(local):
            return tf.identity(rows_of_keys)

    @tf.function(input_signature=[keys_of_batch])  # type: ignore[untyped-decorator]
    def push(keys: Any) -> Any:
        return applied(keys, given)

    @tf.function(input_signature=[keys_of_batch])  # type: ignore[untyped-decorator]
    def step(keys: Any) -> Any:
        with tf.device(local), tf.GradientTape() as tape:
            rows_of_keys = tf.identity(gathered(keys))
            tape.watch(rows_of_keys)
            loss = tf.reduce_sum(rows_of_keys * given)
        return applied(keys, tape.gradient(loss, rows_of_keys))

    def made() -> Any:
        return tf.constant(next(batches))

    tools.time("pull", dim, made, lambda keys: pull(keys).numpy())
    tools.time("push", dim, made, lambda keys: push(keys).numpy())
    tools.time("step", dim, made, lambda keys: step(keys).numpy())
