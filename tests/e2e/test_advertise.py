"""Servers that listen on every address, and tell others one that they can dial."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import sparserow as sr
from sparserow.proto.control import ControlClient
from sparserow.serving.client.replica_map import fetch_view
from sparserow_process import Launcher, wait_until

KEYS = np.arange(50, dtype=np.uint64)
OPEN = ("--host=0.0.0.0", "--insecure")


def test_workers_and_clients_dial_what_was_named_or_chosen(launcher: Launcher, tmp_path: Path) -> None:
    coordinator = launcher.start("coordinator", "--shards=2", "--port=0", *OPEN, "--advertise=localhost")
    address = coordinator.wait_for(r"coordinator at (localhost:\d+)")[1]
    to = f"--coordinator={address}"
    launcher.start("ps", to, "--shard=0", *OPEN, "--advertise=127.0.0.3").wait_for(r"served at 127\.0\.0\.3:\d+")
    launcher.start("ps", to, "--shard=1", *OPEN).wait_for(r"served at 127\.0\.0\.1:\d+")
    with ControlClient(address) as control:
        wait_until(lambda: control.status().ready, "the cluster to be ready")
        assert [shard.host for shard in control.cluster().shards] == ["127.0.0.3", "127.0.0.1"]
    with sr.connect(address, "ads") as session:
        table = session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=0.5))
        table.push(KEYS, np.ones((len(KEYS), 4), np.float32))
        rows = table.pull(KEYS)
        assert (rows == -0.5).all()
        session.publish("ctr", root=str(tmp_path / "models"))
    serving = launcher.start(
        "serve", f"--root={tmp_path / 'models'}", "--model=ctr", "--port=0", *OPEN, "--advertise=127.0.0.4"
    )
    told = serving.wait_for(r"ready at gRPC (127\.0\.0\.4:\d+), data plane 127\.0\.0\.4:\d+")[1]
    with sr.ServingClient(told) as client:
        np.testing.assert_array_equal(client.lookup("user", KEYS).rows, rows)
    view = fetch_view([told], deadline_sec=10.0)
    assert [host for host, _ in view.endpoints[0]] == ["127.0.0.4"]


def test_a_wildcard_is_not_told(launcher: Launcher) -> None:
    for command in ("coordinator --shards=1 --port=0", "up --port=0", "ps --coordinator=127.0.0.1:1 --shard=0"):
        line = launcher.start(*command.split(), *OPEN, "--advertise=0.0.0.0").error_line()
        assert "--advertise: '0.0.0.0' is not allowed; allowed: HOST or HOST:PORT" in line


def test_up_tells_one_host_of_all_its_servers(launcher: Launcher) -> None:
    up = launcher.start("up", "--shards=1", "--port=0", *OPEN, "--advertise=localhost")
    ready = up.wait_for(r"shard 0 at (\S+):\d+ [^\n]*\n(?:[^\n]* page at [^\n]*\n)?[^\n]*ready at (\S+):\d+")
    assert ready.groups() == ("localhost", "localhost")
