"""``sparserow train`` with prefetch, and what ``--trace`` writes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from sparserow.worker.data import write_click_log
from sparserow_process import Launcher

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
SAMPLES, BATCH, ACCUMULATE = 6_000, 256, 2


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_click_log(tmp_path_factory.mktemp("log"), rows=SAMPLES, test_rows=1_000, seed=3)


def train(launcher: Launcher, log: Any, folder: Path, name: str, *sets: str) -> tuple[dict[str, Any], list[Any]]:
    """The result, and the events of the trace."""
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 5000}",
        "model.min_rows=1",
        "train.threads=1",
    ]
    settings += [f"train.batch_size={BATCH}", f"train.accumulate={ACCUMULATE}", *sets]
    assigned = [part for setting in settings for part in ("--set", setting)]
    result, trace = folder / f"{name}.json", folder / f"{name}.trace"
    command = ["train", str(JOBS / "demo.yaml"), *assigned, "--json", str(result), "--trace", str(trace)]
    run = launcher.start(*command)
    assert run.popen.wait(600) == 0, run.err
    return json.loads(result.read_text()), json.loads(trace.read_text())["traceEvents"]


def spans(events: list[Any]) -> dict[tuple[int, str], list[Any]]:
    """By (worker, name), in order of their begin."""
    found = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[event["pid"], event["name"]].append(event)
    return found


def assert_well_formed(events: list[Any], workers: int) -> None:
    """Every event is complete, of a worker and a named thread; the spans of one thread nest."""
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {e["pid"] for e in events} == set(range(workers))
    rows = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["dur"] >= 0 <= event["args"]["step"]
            assert (event["pid"], event["tid"]) in named
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        open_ends: list[float] = []
        for begin, end in sorted(row, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 0.5:  # microseconds, rounded
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.5
            open_ends.append(end)


def pulled_in_forward(events: list[Any], rank: int) -> list[Any]:
    """Pulls that a forward waited for, evaluations aside."""
    return [
        pull
        for pull in spans(events)[rank, "pull"]
        for forward in spans(events)[rank, "forward"]
        if pull["tid"] == forward["tid"] and forward["ts"] <= pull["ts"] < forward["ts"] + forward["dur"]
    ]


def test_prefetch_changes_nothing_but_the_time(launcher: Launcher, log: Any, tmp_path: Path) -> None:
    plain, before = train(launcher, log, tmp_path, "plain")
    ahead, after = train(launcher, log, tmp_path, "ahead", "train.prefetch=2")
    assert ahead["history"][0]["train_loss"] == plain["history"][0]["train_loss"]
    for figure in ("test_auc", "test_log_loss", "rows", "refused_steps"):
        assert ahead[figure] == plain[figure]
    assert {lag for counts in ahead["staleness"].values() for lag in counts} == {"0"}
    steps = -(-SAMPLES // (BATCH * ACCUMULATE))
    for events in (before, after):
        assert_well_formed(events, workers=1)
        found = spans(events)
        for name in ("forward", "backward"):
            assert len(found[0, name]) >= steps
        for name in ("step", "push"):
            assert {e["args"]["step"] for e in found[0, name]} == set(range(steps))
    before_threads, after_threads = (
        {name: {e["tid"] for e in spans(events)[0, name]} for name in ("load", "pull", "forward")}
        for events in (before, after)
    )
    assert before_threads["load"] == before_threads["pull"] == before_threads["forward"]
    assert len(after_threads["load"]) > 1  # the loop's own, and a thread
    assert len(after_threads["pull"]) > 1
    assert pulled_in_forward(before, rank=0)
    late = {pull["args"]["step"] for pull in pulled_in_forward(after, rank=0)}
    assert late == {0}, "every lookup found its rows, after the first batch has shown which it needs"


def test_the_trace_has_every_worker(launcher: Launcher, log: Any, tmp_path: Path) -> None:
    sets = ("train.prefetch=2", "train.staleness=2", "train.workers=2")
    result, events = train(launcher, log, tmp_path, "two", *sets)
    assert result["workers"] == 2
    assert_well_formed(events, workers=2)
    found = spans(events)
    for rank in range(2):
        for name in ("load", "dedup", "prefetch", "pull", "forward", "backward", "allreduce", "vote", "push"):
            assert found[rank, name], (rank, name)
        pushes = {e["tid"] for e in found[rank, "push"]}
        assert len(pushes) == 2  # prepared by the loop, finished in the background


@pytest.mark.full
def test_workers_that_never_meet_write_a_trace_each(launcher: Launcher, log: Any, tmp_path: Path) -> None:
    sets = ("train.prefetch=2", "train.staleness=2", "train.workers=2", "train.dense=ps")
    _, events = train(launcher, log, tmp_path, "apart", *sets)
    others = json.loads((tmp_path / "apart.trace.1").read_text())["traceEvents"]
    for rank, own in enumerate((events, others)):
        assert {event["pid"] for event in own} == {rank}
        assert spans(own)[rank, "prefetch"]
        assert not pulled_in_forward(own, rank)  # the dense tensors were prefetched as well


def test_a_trace_that_cannot_be_written_is_refused_at_once(launcher: Launcher, tmp_path: Path) -> None:
    run = launcher.start("train", str(JOBS / "demo.yaml"), "--trace", str(tmp_path / "no" / "file"))
    assert run.end() != 0
    assert "--trace" in run.err
    assert "cannot be written" in run.err
