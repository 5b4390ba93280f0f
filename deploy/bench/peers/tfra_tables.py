"""TensorFlow Recommenders Addons (TFRA): a cuckoo hash table, on TensorFlow's gRPC parameter server or in one process.

``pull`` and ``push`` are a lookup and an upsert of a table on a server, ``read`` and ``update`` those of a local one.
``step`` is lookup, forward, backward and Adagrad of local tables, whose sums are in a second table.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported: TFRA has optimizers of that one

import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons as tfra

if TYPE_CHECKING:
    from .worker import Tools

_SERVER = "/job:ps/replica:0/task:0/device:CPU:0"
_FILL = 100_000  # rows of an upsert


def serve(_: dict[str, Any], tools: Tools) -> None:
    """Runs a parameter server until the process is killed; it has the operators of TFRA, which are imported."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = tf.distribute.Server({"ps": [f"127.0.0.1:{port}"]}, job_name="ps", task_index=0)
    tools.ready(port)
    server.join()


def measure(asked: dict[str, Any], tools: Tools) -> None:
    """Measures tables of each dim."""
    tools.note_versions("tensorflow", "tensorflow-recommenders-addons")
    tf.config.threading.set_intra_op_parallelism_threads(asked["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(asked["threads"])
    is_remote = any(work.split()[0] in ("pull", "push") for work in asked["works"])
    if is_remote:
        tf.config.experimental_connect_to_host(f"127.0.0.1:{tools.start('serve')}", job_name="ps")
    local = tf.config.list_logical_devices("CPU")[0].name
    batches = tools.batches()
    for dim in tools.dims():
        table = _filled(_SERVER if is_remote else local, asked["rows"], dim)
        _measure_table(table, dim, batches, local, tools)
        if tools.has("step", dim):
            _measure_step(table, dim, batches, tools)


def _filled(device: str, rows: int, dim: int) -> Any:
    table = tfra.dynamic_embedding.get_variable(
        f"rows{dim}",
        key_dtype=tf.int64,
        value_dtype=tf.float32,
        dim=dim,
        devices=[device],
        initializer=0.01,
        init_size=2 * rows,
    )
    for begin in range(0, rows, _FILL):
        keys = np.arange(begin, min(begin + _FILL, rows), dtype=np.int64)
        table.upsert(tf.constant(keys), tf.fill((len(keys), dim), 0.01))
    assert int(table.size()) == rows
    return table


def _measure_table(table: Any, dim: int, batches: Any, local: str, tools: Tools) -> None:
    given = tf.constant(tools.grads(dim))

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int64)])  # type: ignore[untyped-decorator]
    def looked_up(keys: Any) -> Any:
        rows = table.lookup(keys)
        with tf.device(local):
            return tf.identity(rows)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int64)])  # type: ignore[untyped-decorator]
    def upserted(keys: Any) -> Any:
        with tf.control_dependencies([table.upsert(keys, given)]), tf.device(local):
            return tf.identity(keys[0])

    def made() -> Any:
        return tf.constant(next(batches))

    for kind in ("pull", "read"):
        tools.time(kind, dim, made, lambda keys: looked_up(keys).numpy())
    for kind in ("push", "update"):
        tools.time(kind, dim, made, lambda keys: upserted(keys).numpy())


def _measure_step(table: Any, dim: int, batches: Any, tools: Tools) -> None:
    factors = tf.constant(tools.grads(dim))
    optimizer = tfra.dynamic_embedding.DynamicEmbeddingOptimizer(tf.keras.optimizers.legacy.Adagrad(0.01))
    name = f"rows_of_step{dim}"

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int64)])  # type: ignore[untyped-decorator]
    def step(keys: Any) -> Any:
        def loss() -> Any:
            return tf.reduce_sum(tfra.dynamic_embedding.embedding_lookup(table, keys, name=name) * factors)

        update = optimizer.minimize(loss, lambda: [table.get_trainable_by_name(name)])
        with tf.control_dependencies([update]):
            return tf.identity(keys[0])

    tools.time("step", dim, lambda: tf.constant(next(batches)), lambda keys: step(keys).numpy())
    keys = tf.constant(next(batches))
    before = table.lookup(keys)
    step(keys)
    if not bool(tf.reduce_all(tf.reduce_any(before != table.lookup(keys), axis=1))):
        raise RuntimeError("a step has left rows as they were")
