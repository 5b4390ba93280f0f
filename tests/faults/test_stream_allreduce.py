"""Workers that average gradients train on each event of a stream once, where the job goes on from its checkpoints."""

from __future__ import annotations

import json
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from kafka_mock import MockKafka, mock_kafka
from sparserow_process import Launcher, Process, wait_until
from stream_job import counters, counts_of, steps_of, write_stream_job, zipf_events

pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")

EVENTS = 12_000
PARTITIONS = 3  # of which one worker has two


def has_gone_on(address: str, step: int, run: Process) -> bool:
    return steps_of(address) >= step or run.popen.poll() is not None


def fill(kafka: MockKafka, events: list[bytes]) -> None:
    kafka.produce("clicks", {part: events[part::PARTITIONS] for part in range(PARTITIONS)})


@pytest.mark.parametrize("staleness", [0, None])
def test_workers_that_average_gradients_are_killed(launcher: Launcher, tmp_path: Path, staleness: int | None) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    draw, killed = random.Random(seed), 0
    with mock_kafka() as kafka:
        kafka.create("clicks", PARTITIONS)
        events = zipf_events(EVENTS, seed)
        fill(kafka, events)
        up = launcher.start("up", "--shards=2", "--port=0", "--worker-lease=2s")
        address = up.wait_for(r"ready at (\S+:\d+)")[1]
        train = {"staleness": staleness, "checkpoint": {"url": str(tmp_path / "saves"), "every_steps": 10}}
        topic = {"brokers": kafka.brokers, "topics": ["clicks"], "compacted": True}
        job = write_stream_job(tmp_path, {"kafka": topic, "until": "latest"}, train)
        result = tmp_path / "result.json"
        launcher.environment["PYTHONPATH"] = str(tmp_path)
        arguments = (str(job), f"--set=cluster.address={address}", "--resume=auto", "--json", str(result))
        for _ in range(2):
            run, begun = launcher.start("train", *arguments), steps_of(address)
            is_under_way = partial(has_gone_on, address, begun + draw.randint(5, 40), run)
            wait_until(is_under_way, "some steps", 200)
            if workers := launcher.by_role()["worker"]:
                draw.choice(workers).kill()
                killed += 1
            run.end()
        assert killed > 0
        assert launcher.start("train", *arguments).end() == 0
        expected = counts_of(events)
        assert counters(launcher, address, tmp_path / "rows", expected) == expected
        more = zipf_events(EVENTS // 4, seed + 1)
        fill(kafka, more)
        assert launcher.start("train", *arguments).end() == 0
        assert counters(launcher, address, tmp_path / "more", counts_of(events + more)) == counts_of(events + more)
        assert json.loads(result.read_text())["stream"]["events"] == len(more)
        up.signal(signal.SIGTERM)
        assert up.end() == 0
