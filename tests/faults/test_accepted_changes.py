"""A restore into tables with another dim, dtype or optimizer, which are accepted by name; a shard that ends afterwards
gets the same rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserow as sr
from restart_scene import shard_returns, status_of
from sparserow.proto.checkpoint.accepted import as_float32, stored_as
from sparserow.proto.errors import FailedPrecondition, InvalidArgument
from sparserow_process import Launcher

KEYS = np.arange(1, 3000, dtype=np.uint64)
DIM, WIDE = 4, 6
NEW = {"init": sr.Uniform(-0.5, 0.5), "seed": 7}


@pytest.fixture
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        yield cluster


def connected(cluster: sr.LocalCluster, namespace: str) -> sr.Session:
    return sr.connect(cluster.address, namespace, staleness=1, rank=0, world_size=1, namespace_policy="continue")


def saved(session: sr.Session, url: str, dtype: str = "float32") -> np.ndarray:
    """Saves a table with rows in a chain of two checkpoints, and returns its weights; the table is dropped."""
    made = session.create_table("t", dim=DIM, dtype=dtype, optimizer=sr.optim.Adagrad(lr=0.1))
    draw = np.random.default_rng(3)
    made.push(KEYS, draw.normal(size=(len(KEYS), DIM)).astype(np.float32))
    session.save(url)
    made.push(KEYS[::3], draw.normal(size=(len(KEYS[::3]), DIM)).astype(np.float32))
    session.save(url, full_every=9)
    weights = made.pull(KEYS)
    session.drop_table("t")
    return weights


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dim": ({"dim": WIDE}, ["t.dim"]),
    "dtype": ({"dtype": "bfloat16"}, ["t.dtype"]),
    "half": ({"dtype": "float16"}, ["*.dtype"]),
    "optimizer": ({"optimizer": sr.optim.Adam(lr=0.1)}, ["t.optimizer"]),
    "all": ({"dim": WIDE, "dtype": "bfloat16", "optimizer": sr.optim.SGD(lr=1.0)}, ["*.dim", "*.dtype", "*.optimizer"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_accepted_is_carried_over(cluster: sr.LocalCluster, tmp_path: Path, name: str) -> None:
    options, accept = CHANGES[name]
    url, namespace = str(tmp_path), f"accept-{name}"
    with connected(cluster, namespace) as session:
        before = saved(session, url)
        assert status_of(cluster.address).checkpoint_links == 2, "the second save has the changes since the first"
        present = {"dim": DIM, "optimizer": sr.optim.Adagrad(lr=0.1), **NEW, **options}
        table = session.create_table("t", **present)
        initial = table.pull(KEYS)
        for missing in range(len(accept)):
            key = accept[missing].rpartition(".")[2]
            with pytest.raises(FailedPrecondition, match=rf"t has {key} .*where {namespace}/t\.{key} is in accept"):
                session.restore(url, accept=accept[:missing] + accept[missing + 1 :])
        np.testing.assert_array_equal(table.pull(KEYS), initial, "a refused restore changes nothing")
        session.restore(url, accept=accept)
        wanted = initial.copy()
        wanted[:, :DIM] = as_float32(stored_as(before, present.get("dtype", "float32")))
        np.testing.assert_array_equal(table.pull(KEYS), wanted)
        for shard in range(2):
            shard_returns(cluster, shard)
        np.testing.assert_array_equal(table.pull(KEYS), wanted)
        if name == "dim":  # the first step of an Adagrad that begins anew is as long as its rate
            table.push(KEYS, np.ones((len(KEYS), WIDE), np.float32))
            np.testing.assert_allclose(table.pull(KEYS), wanted - 0.1, atol=1e-5)
        now = table.pull(KEYS)
        session.save(url + "/next")
        session.restore(url + "/next")
        np.testing.assert_array_equal(table.pull(KEYS), now)


def test_the_state_goes_on_with_another_dtype(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    url = str(tmp_path)
    with connected(cluster, "state") as session:
        before = saved(session, url, "bfloat16")
        table = session.create_table("t", dim=DIM, dtype="float32", optimizer=sr.optim.Adagrad(lr=0.1))
        session.restore(url, accept=["t.dtype"])
        np.testing.assert_array_equal(table.pull(KEYS), before)
        table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))
        moved = before - table.pull(KEYS)
        assert moved.min() > 0
        assert moved.mean() < 0.09, "the sums of squares that were saved make each step shorter than the first one"


def test_what_cannot_be_accepted_is_refused_by_name(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    url = str(tmp_path)
    with connected(cluster, "refused") as session:
        saved(session, url)
        for each in ("t.width", "dim", ".dim", "t"):
            with pytest.raises(InvalidArgument, match=r"restore\.accept: .*allowed: TABLE\.dim, TABLE\.dtype or"):
                session.restore(url, accept=[each])
        with pytest.raises(
            InvalidArgument, match=r"accept: table 'refused/u' is not restored; restored are: refused/t"
        ):
            session.restore(url, accept=["u.dim"])
        session.create_table("t", dim=DIM // 2, optimizer=sr.optim.Adagrad(lr=0.1))
        with pytest.raises(FailedPrecondition, match=r"has dim 2, the checkpoint has 4; columns are not dropped"):
            session.restore(url, accept=["t.dim"])


def test_the_command_accepts_as_well(launcher: Launcher, tmp_path: Path) -> None:
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        url = str(tmp_path)
        with connected(cluster, "command") as session:
            before = saved(session, url)
            session.create_table("t", dim=WIDE, optimizer=sr.optim.Adagrad(lr=0.1))
        words = ["checkpoint", "restore", url, f"--coordinator={cluster.address}", "--yes"]
        refused = launcher.start(*words)
        assert refused.end() == 1
        assert "where command/t.dim is in accept" in refused.err
        restored = launcher.start(*words, "--accept=command/t.dim")
        assert restored.end() == 0, restored.err
        with connected(cluster, "command") as session:
            np.testing.assert_array_equal(session.table("t").pull(KEYS)[:, :DIM], before)


def test_weights_are_rounded_as_torch_does() -> None:
    import torch

    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    values = np.array([draw.uniform(-3, 3) * 10.0 ** draw.randrange(-30, 30) for _ in range(5000)], np.float32)
    values = np.append(values, np.array([0.0, -0.0, 1.00390625, 1.01171875, 65504.0], np.float32))[:, None]
    for dtype in ("bfloat16", "float16", "float32"):
        with np.errstate(over="ignore"):
            found = as_float32(stored_as(values, dtype))
        np.testing.assert_array_equal(found, torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy())
