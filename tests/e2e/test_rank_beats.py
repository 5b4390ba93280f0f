"""Ranks that wait for one that works alone: beyond the timeout of their group, and no longer than it lives."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from sparserow.proto.process.lone_work import lone_work
from sparserow.worker.session import rank_beats
from sparserow.worker.session.rank_beats import meet
from sparserow.worker.training.process_group import joined_group
from sparserow_process import free_port, run_ranks

TIMEOUT = datetime.timedelta(seconds=3)
WORK_SEC = 7.0


def works_alone(group: object, folder: Path) -> None:
    """Rank 0 works for three times the timeout, and the other one gets what it made."""
    if dist.get_rank() == 0:
        with lone_work.doing("statistics of the training files"):
            for part in range(9):
                time.sleep(WORK_SEC / 9)
                lone_work.progress(f"{part:,} samples")
    shared = group.share(dist.get_rank() + 5, what="statistics of the training files")  # type: ignore[attr-defined]
    assert shared == 5


def is_late(group: object, folder: Path) -> None:
    """The other one is late by less than the timeout, without a word, several times."""
    for turn in range(3):
        if dist.get_rank() == 1:
            time.sleep(2.0)
        assert group.share(turn, what="columns") == turn  # type: ignore[attr-defined]
    assert not list_of_keys()


def hangs(group: object, folder: Path) -> None:
    """Rank 0 stops in the middle of its work."""
    if dist.get_rank() == 0:
        (folder / "pid").write_text(str(os.getpid()))
        with lone_work.doing("publication of the model"):
            lone_work.progress("12 rows")
            time.sleep(3.0)
            os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(
        sr.errors.DeadlineExceeded,
        match=r"^publication of the model: 1 of 2 ranks have not come, and none of them has given a sign of life for "
        r"3 s; rank 0 was at: publication of the model: 12 rows$",
    ):
        group.wait("publication of the model")  # type: ignore[attr-defined]
    (folder / "told").touch()
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    os._exit(0)


def waits_within(group: object, folder: Path) -> None:
    """A rank that waits gives no signs of life, or two that wait for each other would do so for ever."""
    if dist.get_rank() == 1:
        time.sleep(6.0)
        os._exit(0)
    with (
        lone_work.doing("checkpoint"),
        pytest.raises(sr.errors.DeadlineExceeded, match=r"^other: 1 of 2 ranks .* for 3 s$"),
    ):
        meet("other")
    os._exit(0)


def list_of_keys() -> list[str]:
    """Keys of meetings that are over; those of the last one may be there."""
    store, made = rank_beats._made[0][1]._store, rank_beats._made[0][1]._number
    keys = [f"{kind}/{number}" for kind in ("all", "count") for number in range(1, made)]
    return [key for key in keys if store.check([key])]


def own_loop(folder: Path) -> None:
    """A loop without a job: the others wait for the rank that learns features, beyond the timeout of their group."""
    rank = int(sys.argv[1])
    (folder / f"here-{rank}").touch()
    while not (folder / f"here-{1 - rank}").exists():  # a process may start later than the other waits for it
        time.sleep(0.01)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=TIMEOUT)

    def slow() -> Iterator[dict[str, np.ndarray]]:
        for part in range(3):
            time.sleep(WORK_SEC / 3)
            yield {"age": np.arange(10.0) + part}

    with sr.connect((folder / "address").read_text(), "ads", deadline_sec=60.0) as session:
        features = sr.features.Features([sr.features.NumericFeature("age", scale="min_max")]).fit(
            slow(), session=session
        )
        assert features.set.statistics["age"]
    dist.destroy_process_group()


def fails(group: object, folder: Path) -> None:
    """Rank 0 ends by an error while the other one waits for it."""
    if dist.get_rank() == 0:
        time.sleep(1.0)
        raise sr.errors.NotFound("data.train: there is none")
    with pytest.raises(sr.errors.Unavailable, match=r"^lines: rank 0 has left: NotFound: data\.train: there is none$"):
        group.share(0, what="lines")  # type: ignore[attr-defined]
    (folder / "told").touch()


def leaves_no_thread(folder: Path) -> None:
    """A thread of a group that has ended may still drop a tensor when Python is gone, and the process aborts."""
    with joined_group(int(sys.argv[1]), 2, f"file://{folder}/meet", timeout=TIMEOUT) as group:
        towers = DistributedDataParallel(torch.nn.Linear(2, 1))
        towers(torch.ones(1, 2)).sum().backward()
        assert group.total(1) == 2
        assert any("gloo" in name for name in names_of_threads())
        del towers
    assert not [name for name in names_of_threads() if "gloo" in name]


def names_of_threads() -> list[str]:
    """The names of this process's threads, those that Python does not know among them."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


CASES = {case.__name__: case for case in (works_alone, is_late, hangs, waits_within, fails)}


def test_an_own_loop_waits_for_the_rank_that_learns(tmp_path: Path) -> None:
    with sr.local_cluster(shards=1) as cluster:
        (tmp_path / "address").write_text(cluster.address)
        run_ranks(__file__, 2, "own_loop", tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_ranks_wait(case: str, tmp_path: Path) -> None:
    (tmp_path / "port").write_text(str(free_port()))
    if case in ("hangs", "fails"):
        with pytest.raises(AssertionError):  # rank 0 was killed, or has ended by its error
            run_ranks(__file__, 2, case, tmp_path)
        assert (tmp_path / "told").exists()
    else:
        run_ranks(__file__, 2, case, tmp_path)


def test_a_group_that_has_ended_leaves_no_thread(tmp_path: Path) -> None:
    run_ranks(__file__, 2, "leaves_no_thread", tmp_path)


def act() -> None:
    """One rank of a case, by the arguments of this program."""
    rank_beats._BEAT_SEC = 0.5
    rank, case, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if case in ("own_loop", "leaves_no_thread"):
        globals()[case](folder)
        return
    by_store = f"tcp://127.0.0.1:{(folder / 'port').read_text()}"
    init = by_store if case == "works_alone" else f"file://{folder}/meet"
    with joined_group(rank, 2, init, timeout=TIMEOUT) as group:
        CASES[case](group, folder)


if __name__ == "__main__":
    act()
