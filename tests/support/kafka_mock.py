"""A mock cluster of Kafka: librdkafka's own, in a process of its own, driven by ctypes.

It delivers aborted transactions, answers no question for the offset of a time, and keeps about 5 MB of a partition.
What it cannot do is tested against a scripted consumer. No real broker is run.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_START_SEC = 30.0


class MockKafka:
    """A running mock cluster.

    Args:
        orders: the pipe to its process.
        brokers: the addresses of its brokers.
    """

    def __init__(self, orders: Connection, brokers: str) -> None:
        self._orders, self.brokers = orders, brokers

    def create(self, topic: str, partitions: int) -> None:
        """Makes a topic."""
        self._order("rd_kafka_mock_topic_create", topic.encode(), partitions, 1)

    def stop_broker(self, broker: int) -> None:
        """Ends the connections of a broker, and accepts none; brokers count from 1."""
        self._order("rd_kafka_mock_broker_set_down", broker)

    def start_broker(self, broker: int) -> None:
        """Has a broker accept connections again."""
        self._order("rd_kafka_mock_broker_set_up", broker)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Deletes the records before an offset, as retention does."""
        self._order("rd_kafka_mock_partition_delete_records", topic.encode(), partition, offset)

    def _order(self, function: str, *arguments: object) -> None:
        self._orders.send((function, arguments))
        if not self._orders.poll(_START_SEC):
            raise TimeoutError("the mock cluster does not answer")
        code = self._orders.recv()
        assert code == 0, f"{function}{arguments}: {code}"

    def produce(self, topic: str, values: Mapping[int, Iterable[bytes | None]]) -> None:
        """Produces values to partitions, and waits until the brokers have them."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.brokers, "linger.ms": 5})
        for partition, some in values.items():
            for value in some:
                while True:
                    try:
                        producer.produce(topic, value, partition=partition)
                        break
                    except BufferError:
                        producer.poll(0.1)
        assert producer.flush(60) == 0

    def read(self, topic: str, partition: int = 0, *, seconds: float = 5.0) -> list[Any]:
        """Returns the messages of a partition that there are now."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.brokers,
                "group.id": "tests",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0)])
        found: list[Any] = []
        while True:
            message = consumer.poll(seconds)
            if message is None or message.error() is not None:
                consumer.close()
                return found
            found.append(message)


def _serve(orders: Connection, brokers: int) -> None:
    import confluent_kafka

    (path,) = Path(confluent_kafka.__file__).parent.with_suffix(".libs").glob("librdkafka*")
    library = ctypes.CDLL(str(path))
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    library.rd_kafka_conf_new.restype = pointer
    library.rd_kafka_new.restype, library.rd_kafka_new.argtypes = pointer, [number, pointer, text, ctypes.c_size_t]
    library.rd_kafka_mock_cluster_new.restype = pointer
    library.rd_kafka_mock_cluster_new.argtypes = [pointer, number]
    library.rd_kafka_mock_cluster_bootstraps.restype = text
    library.rd_kafka_mock_cluster_bootstraps.argtypes = [pointer]
    types = {
        "rd_kafka_mock_topic_create": [pointer, text, number, number],
        "rd_kafka_mock_broker_set_down": [pointer, ctypes.c_int32],
        "rd_kafka_mock_broker_set_up": [pointer, ctypes.c_int32],
        "rd_kafka_mock_partition_delete_records": [pointer, text, ctypes.c_int32, ctypes.c_int64],
    }
    for name, arguments in types.items():
        getattr(library, name).argtypes = arguments
    problem = ctypes.create_string_buffer(512)
    handle = library.rd_kafka_new(0, library.rd_kafka_conf_new(), problem, 512)
    cluster = library.rd_kafka_mock_cluster_new(handle, brokers)
    orders.send(library.rd_kafka_mock_cluster_bootstraps(cluster).decode())
    while True:
        try:
            function, given = orders.recv()
        except EOFError:
            return
        orders.send(getattr(library, function)(cluster, *given))


@contextmanager
def mock_kafka(brokers: int = 1) -> Iterator[MockKafka]:
    """Runs a mock cluster for the time of the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, brokers), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_SEC):
            raise TimeoutError("the mock cluster does not start")
        yield MockKafka(ours, ours.recv())
    finally:
        ours.close()
        process.join(1.0)
        process.kill()
        process.join()
