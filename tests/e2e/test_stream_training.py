"""Workers that average gradients read a stream: options of their steps, and another number of workers."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparserow_process import Launcher
from stream_job import counters, counts_of, write_stream_job, zipf_events


def write_files(folder: Path, count: int, seed: int) -> list[bytes]:
    """Files of unequal lengths; returns their events."""
    events: list[bytes] = []
    draw = random.Random(seed)
    (folder / "log").mkdir(exist_ok=True)
    for number in range(count):
        some = zipf_events(draw.randint(1, 900), seed + number)
        (folder / "log" / f"{seed:02}-{number}.jsonl").write_bytes(b"\n".join(some) + b"\n")
        events += some
    return events


def job_of(folder: Path, **train: Any) -> Path:
    follow = {"files": f"{folder}/log/*.jsonl", "age": "0s"}
    checkpoint = {"url": f"{folder}/saves", "every_steps": 7}
    return write_stream_job(folder, {"follow": follow, "until": "latest"}, {"checkpoint": checkpoint, **train})


def trained(launcher: Launcher, job: Path, address: str, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Trains on the events that are there, from the newest checkpoint on, and returns the result of the run."""
    launcher.environment["PYTHONPATH"] = str(job.parent)
    result = job.parent / "result.json"
    options = [f"--set={each}" for each in (f"cluster.address={address}", *sets)]
    run = launcher.start("train", str(job), "--resume=auto", "--json", str(result), *options)
    assert run.end() == 0, run.err
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"accumulate": 3, "staleness": 4},
        {"parallel": {"shard": "all"}},
        {"test_every": {"steps": 5}, "on_nonfinite": "skip", "amp": "bfloat16"},
    ],
    ids=str,
)
def test_each_event_is_trained_on_once(launcher: Launcher, tmp_path: Path, train: dict[str, Any]) -> None:
    events = write_files(tmp_path, 5, seed=1)
    up = launcher.start("up", "--shards=2", "--port=0")
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    found = trained(launcher, job_of(tmp_path, **train), address)
    assert (found["stream"]["events"], found["history"][0]["samples"]) == (len(events), len(events))
    assert counters(launcher, address, tmp_path / "rows", counts_of(events)) == counts_of(events)
    up.signal(signal.SIGTERM)
    assert up.end() == 0


def test_a_run_goes_on_with_new_events_and_another_number_of_workers(launcher: Launcher, tmp_path: Path) -> None:
    events = write_files(tmp_path, 3, seed=1)
    up = launcher.start("up", "--shards=1", "--port=0")
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    job = job_of(tmp_path)
    for number, workers in enumerate((2, 3, 1), start=2):
        found = trained(launcher, job, address, (f"train.workers={workers}",))
        assert counters(launcher, address, tmp_path / f"rows{number}", counts_of(events)) == counts_of(events)
        new = write_files(tmp_path, 3, seed=number)
        events += new
    assert found["workers"] == 1
    up.signal(signal.SIGTERM)
    assert up.end() == 0


def test_a_step_that_is_refused_leaves_its_events_out(launcher: Launcher, tmp_path: Path) -> None:
    write_files(tmp_path, 3, seed=1)
    up = launcher.start("up", "--shards=1", "--port=0")
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    job = job_of(tmp_path, on_nonfinite="skip")
    path = tmp_path / "counting.py"
    diverges = "self.bias * (0.0 if item.sum() % 3 else float('nan'))"
    path.write_text(path.read_text().replace("self.bias * 0.0", diverges))
    found = trained(launcher, job, address)
    assert found["refused_steps"] > 0
    samples = found["history"][0]["samples"]
    with_rows = counters(launcher, address, tmp_path / "rows", {f"i{item}": 0 for item in range(2000)})
    assert 0 < sum(with_rows.values()) == samples < found["stream"]["events"]
    up.signal(signal.SIGTERM)
    assert up.end() == 0


def test_times_of_events_move_the_watermark_of_all_workers(launcher: Launcher, tmp_path: Path) -> None:
    follow = {"files": f"{tmp_path}/log/*.jsonl", "age": "0s"}
    stream = {"follow": follow, "until": "latest", "event_time": {"max_ahead": "1h", "max_skew": "10min"}}
    path = write_stream_job(tmp_path, stream)
    job = json.loads(path.read_text())
    job["data"]["columns"] = {"label": "click", "timestamp": "at", "timestamp_unit": "s"}
    path.write_text(json.dumps(job))
    begin, far = 1_700_000_000, 4_000_000_000
    (tmp_path / "log").mkdir()
    for number in range(4):
        times = [begin + 900 * number + second for second in range(900)] + [begin]  # the last one is late
        events = [{"item": f"i{at % 50}", "click": 1, "at": at} for at in times]
        if number == 3:
            events.append({"item": "i0", "click": 1, "at": far})
        (tmp_path / "log" / f"{number}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "like.jsonl").write_text(
        "".join(json.dumps({"item": f"i{at}", "click": at % 2, "at": begin + at}) + "\n" for at in range(9))
    )
    up = launcher.start("up", "--shards=1", "--port=0")
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    launcher.environment["PYTHONPATH"] = str(tmp_path)
    result = tmp_path / "result.json"
    run = launcher.start("train", str(path), f"--set=cluster.address={address}", "--json", str(result))
    assert run.end() == 0, run.err
    found = json.loads(result.read_text())["stream"]
    assert (found["events"], found["ahead"]) == (4 * 901 + 1, 1)
    assert found["late"] <= 4
    up.signal(signal.SIGTERM)
    assert up.end() == 0
