"""``sparserow checkpoint``: save, list, inspect, verify, prune and restore on running clusters."""

from __future__ import annotations

import numpy as np

import sparserow as sr


def run(launcher, *arguments: str) -> str:
    process = launcher.start("checkpoint", *arguments)
    assert process.end() == 0, process.err
    return process.out


def test_the_command(launcher, tmp_path):
    url = str(tmp_path / "ckpt")
    keys = np.arange(100, dtype=np.uint64)
    assert "no checkpoint in " in run(launcher, "list", url)
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        with sr.connect(cluster.address, "ads", staleness=None) as session:
            table = session.create_table("user", dim=4, optimizer=sr.optim.Adagrad(lr=0.1), dtype="bfloat16")
            table.push(keys, np.ones((100, 4), np.float32))
            expected = table.pull(keys)
            for _ in range(3):
                out = run(launcher, "save", url, f"--coordinator={cluster.address}", "--keep=2")
                assert "saved 100 rows to " in out
        listed = run(launcher, "list", url)
        assert "save-000001" not in listed
        assert "save-000003" in listed
        inspected = run(launcher, "inspect", url, "--name=save-000002")
        assert "ads/user" in inspected
        assert "bfloat16" in inspected
        assert "Adagrad" in inspected
        assert "job ads/ads: asynchronous" in inspected
        assert "all as they were written" in run(launcher, "verify", url)
        part = next((tmp_path / "ckpt" / "save-000003").glob("rows.1.*"))
        data = bytearray(part.read_bytes())
        data[-3] ^= 1
        part.write_bytes(data)
        line = launcher.start("checkpoint", "verify", url).error_line()
        assert f"DataLoss: {part}: is damaged: its checksum does not match" in line
        line = launcher.start(
            "checkpoint", "restore", url, "--name=save-9", "--yes", f"--coordinator={cluster.address}"
        ).error_line()
        assert "there is no checkpoint 'save-9'; there are: save-000002, save-000003" in line
        line = launcher.start("checkpoint", "save", "nosuch://x", f"--coordinator={cluster.address}").error_line()
        assert "InvalidArgument: url: 'nosuch://x' is not allowed" in line
    with sr.local_cluster(shards=1, slot_count=64) as other:
        where = f"--coordinator={other.address}"
        asked = ("restore", url, "--name=save-000002", where, "--rename=ads/user=ads/person")
        line = launcher.start("checkpoint", *asked).error_line()
        assert "restore: there is no terminal for the confirmation; allowed: --yes" in line
        out = run(launcher, *asked, "--yes")
        assert "restored 100 rows of " in out
        assert "in the namespaces ads" in out
        with sr.connect(other.address, "ads", staleness=None) as session:
            np.testing.assert_array_equal(session.table("person").pull(keys), expected)
    # It was read whole last, and the newest one is damaged.
    assert "nothing to remove" in run(launcher, "prune", url, "--keep=1")
    data[-3] ^= 1
    part.write_bytes(data)
    run(launcher, "verify", url)
    assert "removed save-000002" in run(launcher, "prune", url, "--keep=1")
    assert "nothing to remove" in run(launcher, "prune", url, "--keep=1")
