"""Live sync goes along when training goes back to an earlier checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from gated_store import GatedStore
from sparserow.deploy.observe.serving_view import describe_serving
from sparserow.proto.errors import DataLoss, FailedPrecondition
from sparserow_process import wait_until

KEYS = np.arange(500, dtype=np.uint64)
DIM = 4


def test_serving_goes_back_with_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads") as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1), init=sr.Uniform(-1, 1))
        table.assign(KEYS, rng.standard_normal((len(KEYS), DIM), np.float32))
        saved = table.pull(KEYS)
        session.save(str(tmp_path / "ckpt"))
        with (
            sr.local_serving("now", follow=cluster.address, namespace="ads", sync_interval="20ms") as serving,
            sr.ServingClient(serving.addresses) as client,
        ):
            born = KEYS + np.uint64(10_000)
            table.push(KEYS[100:], rng.standard_normal((400, DIM)).astype(np.float32))
            table.assign(born, rng.standard_normal((len(born), DIM), np.float32))
            table.delete(KEYS[:50])

            def equals(keys: np.ndarray, found: np.ndarray) -> bool:
                served = client.lookup("user", keys, deadline_ms=5000)
                return bool((served.rows == table.pull(keys)).all() and (served.found == found).all())

            both = np.concatenate([KEYS, born])
            wait_until(lambda: equals(both, ~np.isin(both, KEYS[:50])), "what changed")
            session.restore(str(tmp_path / "ckpt"))
            np.testing.assert_array_equal(table.pull(KEYS), saved)
            wait_until(lambda: equals(both, np.isin(both, KEYS)), "the restored rows")
            np.testing.assert_array_equal(client.lookup("user", KEYS).rows, saved)
            table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))
            wait_until(lambda: equals(both, np.isin(both, KEYS)), "what changed after the restore")


def test_rows_that_are_being_loaded_are_not_served(tmp_path: Path) -> None:
    """A restore in place empties the tables of the shards, and may fail then: replicas keep what they have."""
    rng = np.random.default_rng(2)
    url = tmp_path / "ckpt"
    with (
        GatedStore(url) as store,  # before the shards, which find it by the environment
        sr.local_cluster(shards=2) as cluster,
        sr.connect(cluster.address, "ads") as session,
    ):
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1), init=sr.Uniform(-1, 1))
        table.assign(KEYS, rng.standard_normal((len(KEYS), DIM), np.float32))
        saved = table.pull(KEYS)
        session.save(str(url))
        table.push(KEYS, rng.standard_normal((len(KEYS), DIM)).astype(np.float32))
        trained = table.pull(KEYS)
        with (
            ThreadPoolExecutor(1) as pool,
            sr.local_serving("now", follow=cluster.address, namespace="ads", sync_interval="20ms") as serving,
            sr.ServingClient(serving.addresses) as client,
        ):

            def serves(expected: np.ndarray) -> bool:
                served = client.lookup("user", KEYS, deadline_ms=5000)
                return bool(served.found.all() and (served.rows == expected).all())

            def problem() -> str:
                return describe_serving(serving.addresses)[0].problem

            wait_until(lambda: serves(trained), "what was trained")
            files = sorted(url.glob("save-000001/rows*"))
            store.hold(r"/rows\..*safetensors", after=len(files))  # the verification reads all of them
            going_back = pool.submit(session.restore, store.url)
            store.until_met()
            wait_until(lambda: "is loading rows of a checkpoint" in problem(), "followers that are told")
            for _ in range(20):
                assert serves(trained)
            data = bytearray(files[0].read_bytes())
            data[-3] ^= 1
            files[0].write_bytes(data)
            store.release()
            with pytest.raises(DataLoss, match="its checksum does not match"):
                going_back.result(120)
            wait_until(lambda: "is damaged" in problem(), "followers that are told")
            for _ in range(20):
                assert serves(trained)
            with pytest.raises(FailedPrecondition, match="is damaged"):
                session.publish("model", root=str(tmp_path / "models"))
            data[-3] ^= 1
            files[0].write_bytes(data)
            session.restore(str(url))
            wait_until(lambda: serves(saved), "the restored rows")
            wait_until(lambda: not problem(), "live sync without a problem")
