"""From a topic to a served score: a model learns from events as they come, and serving answers with what it learnt.

    python -m sparserow.deploy.examples.topic_to_score [--brokers kafka-a:9092]

Without ``--brokers`` a mock cluster of Kafka runs in this process. It needs ``pip install confluent-kafka``.
A first run reads what the topic has, and publishes the model. A second one goes on from there without an end, while a
serving process follows the rows. Then items that nobody has clicked become popular, and the time is taken until their
scores say so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

import sparserow as sr

JOB = """
name: loop
data:
  format: jsonl
  columns: {label: click}
  stream: {kafka: {brokers: "BROKERS", topics: [clicks], dead_letters: clicks-dead}, like: sample.jsonl, max_wait: 50ms}
  test: sample.jsonl
  on_bad_line: skip
features: {user: {kind: id}, item: {kind: id}}
model: {class: DeepFM, args: {rows: {"*": 1000000}, dim: 8, hidden: [16]}}
train:
  {batch_size: 256, dense: ps, staleness: 4, elastic: {}, row_optimizer: {kind: adagrad, lr: 0.2}}
publish: {root: models, model: loop, alias: live}
"""
WAIT_SEC = 120.0


class Events:
    """Users and items, of which some are popular: their clicks, as JSON."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.popular = range(10)

    def draw(self) -> bytes:
        """Returns an event."""
        item = self._random.randrange(100)
        click = self._random.random() < (0.9 if item in self.popular else 0.05)
        return json.dumps(
            {"user": f"u{self._random.randrange(1000)}", "item": f"i{item}", "click": int(click)}
        ).encode()


@contextmanager
def producing(producer: Any, events: Events, per_second: int) -> Iterator[None]:
    """Produces events in a thread for the time of the block."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.05):
            for _ in range(per_second // 20):
                producer.produce("clicks", events.draw())
            producer.poll(0)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        producer.flush(10)


def train(folder: Path, address: str, *sets: str) -> subprocess.Popen[bytes]:
    """Starts a run of the job."""
    words = [sys.executable, "-m", "sparserow.deploy.cli", "train", "job.yaml", "--set", f"cluster.address={address}"]
    return subprocess.Popen([*words, *(f"--set={each}" for each in sets)], cwd=folder)


def score_of(model: sr.ServedModel, item: int) -> float:
    """Returns the mean score of an item for some users."""
    users = [f"u{number}" for number in range(32)]
    return float(model({"user": users, "item": [f"i{item}"] * len(users)}).mean())


def show(brokers: str | None) -> None:
    """Runs the whole, and prints what happens."""
    mock = {} if brokers else {"test.mock.num.brokers": 1}
    producer = Producer({"bootstrap.servers": brokers or "", "log_level": 3, **mock})
    found = producer.list_topics("clicks", timeout=10)
    brokers = brokers or ",".join(f"{each.host}:{each.port}" for each in found.brokers.values())
    events = Events()
    with tempfile.TemporaryDirectory() as name, sr.local_cluster(shards=2) as cluster:
        folder = Path(name)
        (folder / "sample.jsonl").write_bytes(b"\n".join(events.draw() for _ in range(500)) + b"\n")
        (folder / "job.yaml").write_text(JOB.replace("BROKERS", brokers))
        for _ in range(20_000):
            producer.produce("clicks", events.draw())
        producer.flush(10)
        print("a run over what the topic has, which publishes the model", flush=True)
        if train(folder, cluster.address, "data.stream.until=latest").wait(600) != 0:
            raise SystemExit("the first run has failed")
        endless = train(folder, cluster.address, "publish={}")
        try:
            with (
                sr.local_serving("loop", root=str(folder / "models"), follow=cluster.address) as serving,
                sr.ServingClient(serving.addresses, model="loop") as client,
                sr.ServedModel(client, str(folder / "models")) as model,
                producing(producer, events, per_second=2_000),
            ):
                before = score_of(model, 50)
                print(f"scores: item 5, which is popular, {score_of(model, 5):+.2f}; item 50 {before:+.2f}", flush=True)
                events.popular = range(50, 60)
                began = time.monotonic()
                for tick in itertools.count(1):
                    time.sleep(0.25)
                    now = score_of(model, 50)
                    if tick % 8 == 0:
                        print(
                            f"  {time.monotonic() - began:4.1f} s after item 50 became popular: {now:+.2f}", flush=True
                        )
                    if now > before + 1.0:
                        break
                    if time.monotonic() - began > WAIT_SEC or endless.poll() is not None:
                        raise SystemExit("the score of item 50 has not risen")
                print(f"item 50 is served with {now:+.2f} after {time.monotonic() - began:.1f} s", flush=True)
        finally:
            endless.terminate()
            endless.wait(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--brokers", help="HOST:PORT of real brokers, with commas")
    show(parser.parse_args().brokers)
