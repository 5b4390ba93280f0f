"""Each event of a stream is trained on once, whatever is killed: the rows count the events."""

from __future__ import annotations

import json
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from kafka_mock import MockKafka, mock_kafka
from long_form import FULL
from restart_scene import Scene, status_of
from sparserow_process import Launcher, wait_until
from stream_job import counters, counts_of, steps_of, write_stream_job, zipf_events

pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")

PARTITIONS, EVENTS, KILLS = 3, 120_000 if FULL else 24_000, 20 if FULL else 6


def produced(kafka: MockKafka, seed: int) -> list[bytes]:
    """Events of two topics, in equal parts of their partitions."""
    found = zipf_events(EVENTS, seed)
    for number, topic in enumerate(("clicks", "views")):
        kafka.create(topic, PARTITIONS)
        mine = found[number::2]
        kafka.produce(topic, {part: mine[part::PARTITIONS] for part in range(PARTITIONS)})
    return found


def has_joined(scene: Scene, index: int) -> bool:
    """Whether the coordinator knows the shard's present process."""
    return any(
        (shard.shard, shard.pid) == (index, scene.shards[index].popen.pid) for shard in status_of(scene.address).shards
    )


def test_workers_are_killed_in_the_middle(launcher: Launcher, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    with mock_kafka() as kafka:
        events = produced(kafka, seed)
        up = launcher.start("up", "--shards=2", "--port=0", "--worker-lease=2s")
        address = up.wait_for(r"ready at (\S+:\d+)")[1]
        stream = {
            "kafka": {"brokers": kafka.brokers, "topics": ["clicks", "views"], "compacted": True},
            "until": "latest",
        }
        job = write_stream_job(tmp_path, stream)
        result = tmp_path / "result.json"
        launcher.environment["PYTHONPATH"] = str(tmp_path)
        run = launcher.start("train", str(job), "--set", f"cluster.address={address}", "--json", str(result))
        wait_until(lambda: steps_of(address) >= 5 or run.popen.poll() is not None, "the first steps", 200)
        killed = 0
        while killed < KILLS and run.popen.poll() is None:
            workers = launcher.by_role()["worker"]
            if workers:
                draw.choice(workers).kill()
                killed += 1
            time.sleep(draw.uniform(0.2, 1.5))
        print("killed", killed)
        assert run.popen.wait(600) == 0, run.err
        expected = counts_of(events)
        assert counters(launcher, address, tmp_path / "rows", expected) == expected
        assert json.loads(result.read_text())["history"][0]["samples"] == len(events)
        up.signal(signal.SIGTERM)
        assert up.end() == 0


def test_shards_and_the_coordinator_are_killed(launcher: Launcher, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    with mock_kafka() as kafka:
        events = produced(kafka, seed)
        scene = Scene(launcher, tmp_path)
        stream = {
            "kafka": {"brokers": kafka.brokers, "topics": ["clicks", "views"], "compacted": True},
            "until": "latest",
        }
        job = write_stream_job(tmp_path, stream)
        result = tmp_path / "result.json"
        launcher.environment["PYTHONPATH"] = str(tmp_path)
        elastic = f"{{max_restarts: 100, url: {tmp_path}/saves, save_every: 0.5s}}"
        sets = (f"cluster.address={scene.address}", f"train.elastic={elastic}")
        run = launcher.start("train", str(job), "--json", str(result), *(f"--set={each}" for each in sets))
        wait_until(lambda: steps_of(scene.address) >= 5 or run.popen.poll() is not None, "the first steps", 200)
        for index in range(2):
            scene.kill()
            time.sleep(draw.uniform(0, 0.5))
            scene.start()
            wait_until(scene.is_ready, "the cluster to be ready")
            scene.shards[index].popen.kill()
            scene.shards[index].end()
            scene.shards[index] = scene.shard(index)
            # Because a shard that finds no coordinator when it starts ends, as one does that is given a wrong address.
            wait_until(partial(has_joined, scene, index), "the shard to join")
            time.sleep(draw.uniform(0.2, 1.0))
        assert run.popen.wait(600) == 0, run.err
        expected = counts_of(events)
        found = counters(launcher, scene.address, tmp_path / "rows", expected)
        lacking = {item: expected[item] - found.get(item, 0) for item in expected}
        shards = status_of(scene.address).shards
        # Workers send again what a shard that came back lacks; a commit that none has any more is counted.
        assert min(lacking.values()) >= 0, "an event was trained on twice"
        assert sum(lacking.values()) <= 64 * sum(shard.commits_lost for shard in shards)
        assert sum(shard.losses_unknown for shard in shards) == 0
        assert sum(shard.restores for shard in shards) >= 1
        assert json.loads(result.read_text())["stream"]["events"] == len(events)
