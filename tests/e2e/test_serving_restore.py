"""Live sync goes along when training goes back to an earlier checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import sparserow as sr
from sparserow_process import wait_until

KEYS = np.arange(500, dtype=np.uint64)
DIM = 4


def test_serving_goes_back_with_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads") as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.Adagrad(lr=0.1), init=sr.Uniform(-1, 1))
        table.assign(KEYS, rng.standard_normal((len(KEYS), DIM), np.float32))
        saved = table.pull(KEYS)
        sr.save(session, str(tmp_path / "ckpt"))
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
            sr.restore(session, str(tmp_path / "ckpt"))
            np.testing.assert_array_equal(table.pull(KEYS), saved)
            wait_until(lambda: equals(both, np.isin(both, KEYS)), "the restored rows")
            np.testing.assert_array_equal(client.lookup("user", KEYS).rows, saved)
            table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))
            wait_until(lambda: equals(both, np.isin(both, KEYS)), "what changed after the restore")
