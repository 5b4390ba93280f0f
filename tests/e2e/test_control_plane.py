"""Coordinator and parameter servers as processes: start, refusal, restart, health, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sparserow.proto.control import ControlClient
from sparserow.proto.errors import NotFound, SparserowError, Unavailable
from sparserow.proto.optim import Adagrad
from sparserow.proto.schema import TableSchema
from sparserow_process import Launcher, Process, free_port, wait_until

SCHEMA = TableSchema("ads", "user", 8, Adagrad())
READY = r"coordinator at (\S+:\d+)"


@pytest.fixture(autouse=True)
def nothing_left(launcher: Launcher) -> Iterator[None]:
    """Asserts that processes which a test has stopped left none behind."""
    yield
    for process in launcher.living():
        process.terminate()
    wait_until(lambda: not launcher.living(), "all processes to end on SIGTERM")


def start_coordinator(launcher: Launcher, *options: str, shards: int = 1) -> tuple[Process, str]:
    process = launcher.start("coordinator", f"--shards={shards}", *options)
    return process, process.wait_for(READY)[1]


def start_shard(launcher: Launcher, address: str, shard: int = 0, *options: str) -> Process:
    return launcher.start("ps", f"--coordinator={address}", f"--shard={shard}", *options)


def is_ready(client: ControlClient) -> bool:
    try:
        return client.status().ready
    except Unavailable:
        return False


def test_a_half_started_cluster_says_what_it_waits_for(launcher: Launcher) -> None:
    _, address = start_coordinator(launcher, "--port=0", shards=2)
    with ControlClient(address) as client:
        with pytest.raises(Unavailable, match="0 of 2 shards have registered; waiting for shards 0, 1"):
            client.cluster()
        start_shard(launcher, address, 0).wait_for("rows are served at")
        with pytest.raises(Unavailable, match="1 of 2 shards have registered; waiting for shard 1"):
            client.create_table(SCHEMA)
        assert client.list_tables() == ()
        start_shard(launcher, address, 1)
        wait_until(lambda: is_ready(client), "the cluster to be ready")
        view = client.cluster()
    assert [shard.index for shard in view.shards] == [0, 1]
    assert view.slot_owner.shape == (view.slot_count,) == (16384,)
    assert set(view.slot_owner) == {0, 1}


@pytest.mark.parametrize("command", ["coordinator", "ps", "up"])
def test_a_taken_port_is_named(launcher: Launcher, command: str) -> None:
    _, address = start_coordinator(launcher, "--port=0")
    port = address.rpartition(":")[2]
    options = {
        "coordinator": ("--shards=1",),
        "ps": (f"--coordinator={address}", "--shard=0"),
        "up": ("--shards=1",),
    }[command]
    line = launcher.start(command, f"--port={port}", *options).error_line()
    assert f"cannot listen on {address}: Address already in use" in line
    assert "--port" in line


def test_a_taken_port_of_the_page_is_named_and_none_is_served_unasked(launcher: Launcher) -> None:
    process, address = start_coordinator(launcher, "--port=0")
    assert "page at" not in process.out
    line = launcher.start(
        "coordinator", "--shards=1", "--port=0", f"--page-port={address.rpartition(':')[2]}"
    ).error_line()
    assert f"cannot listen on {address}: Address already in use" in line
    assert "choose another port with --page-port (0: any free one)" in line
    line = launcher.start("coordinator", "--shards=1", "--port=0", "--page-port=0", "--host=0.0.0.0").error_line()
    assert "the address is reachable from other machines" in line


@pytest.mark.parametrize("command", ["coordinator --shards=1", "ps --coordinator=127.0.0.1:1 --shard=0", "up"])
def test_an_address_that_others_reach_needs_protection(launcher: Launcher, command: str) -> None:
    line = launcher.start(*command.split(), "--host=0.0.0.0", "--port=0").error_line()
    assert (
        "--host 0.0.0.0: the address is reachable from other machines; give certificates and tokens with --security"
        in line
    )
    assert "--insecure" in line


def test_insecure_accepts_it(launcher: Launcher) -> None:
    _, address = start_coordinator(launcher, "--port=0", "--host=0.0.0.0", "--insecure")
    with ControlClient(f"127.0.0.1:{address.rpartition(':')[2]}") as client:
        assert not client.status().ready


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "ps --coordinator=127.0.0.1:{port} --shard=0",
            "127.0.0.1:{port} cannot be reached: Connection refused",
        ),
        ("ps --coordinator=nowhere --shard=0", "--coordinator: 'nowhere' is not allowed; allowed: HOST:PORT"),
        ("ps --coordinator=127.0.0.1:1 --shard=0 --memory-budget=8Gib", "--memory-budget: '8Gib' is not allowed"),
        ("up --shards=0", "shards: 0 is not allowed; allowed: an integer >= 1"),
        ("up --slot-count=1000", "--slot-count: 1000 is not allowed; allowed: a power of two"),
        ("up --log-format=xml", "format: 'xml' is not allowed; allowed: plain, json"),
        (
            "coordinator --shards=1 --state=/nowhere/state.json",
            "--state /nowhere/state.json: the file cannot be written",
        ),
        ("coordinator --shards=1 --worker-lease=1ms", "--worker-lease: 0.001 is not allowed"),
        (
            "status --coordinator=127.0.0.1:{port}",
            "Connection refused; start it with `sparserow up`",
        ),
    ],
)
def test_bad_input_is_one_line(launcher: Launcher, arguments: str, words: str) -> None:
    port = free_port()
    line = launcher.start(*arguments.format(port=port).split()).error_line()
    assert words.format(port=port) in line


def test_a_shard_is_given_once_and_only_within_the_cluster(launcher: Launcher) -> None:
    _, address = start_coordinator(launcher, "--port=0", shards=2)
    start_shard(launcher, address, 0).wait_for("rows are served at")
    assert "shard 0 is held by process" in start_shard(launcher, address, 0, "--log-level=error").error_line()
    assert "shard: 2 is not allowed" in start_shard(launcher, address, 2, "--log-level=error").error_line()


def test_sigterm_leaves_at_once_and_in_good_order(launcher: Launcher) -> None:
    _, address = start_coordinator(launcher, "--port=0")
    shard = start_shard(launcher, address)
    with ControlClient(address) as client:
        wait_until(lambda: is_ready(client), "the cluster to be ready")
        client.create_table(SCHEMA)
        shard.signal(signal.SIGTERM)
        assert shard.end() == 0
        with pytest.raises(Unavailable, match="shard 0: its process sends no heartbeat"):
            client.cluster()
        line = start_shard(launcher, address, 0, "--log-level=error").error_line()
    assert "ended with its rows of 1 tables" in line


def test_a_coordinator_ends_with_exit_code_0(launcher: Launcher) -> None:
    process, _ = start_coordinator(launcher, "--port=0")
    process.signal(signal.SIGTERM)
    assert process.end() == 0


@pytest.mark.started
def test_a_restarted_coordinator_is_rejoined_with_all_it_knew(launcher: Launcher, tmp_path: Path) -> None:
    port = free_port()
    options = (f"--port={port}", f"--state={tmp_path / 'state.json'}", "--worker-lease=5min")
    first, address = start_coordinator(launcher, *options)
    start_shard(launcher, address)
    with ControlClient(address) as client:
        wait_until(lambda: is_ready(client), "the cluster to be ready")
        schema = client.create_table(SCHEMA)
        identity = client.register_worker(namespace="ads", job="ctr", rank=0, world_size=1)
        before = client.cluster()
        first.popen.kill()
        first.end()
        with pytest.raises(Unavailable, match="cannot be reached"):
            client.cluster()
        start_coordinator(launcher, *options)
        wait_until(lambda: is_ready(client), "the shard to come back")
        after = client.cluster()
        assert (after.cluster_id, after.shards) == (before.cluster_id, before.shards)
        assert client.list_tables("ads") == (schema,)
        client.heartbeat_worker(identity)
        again = client.register_worker(namespace="ads", job="ctr", rank=0, world_size=1)
        assert (again.worker_id, again.epoch) == (identity.worker_id, identity.epoch + 1)


@pytest.mark.started
def test_a_shard_does_not_follow_a_coordinator_that_forgot_its_cluster(launcher: Launcher) -> None:
    port = free_port()
    first, address = start_coordinator(launcher, f"--port={port}")
    shard = start_shard(launcher, address, 0, "--log-level=error")
    with ControlClient(address) as client:
        wait_until(lambda: is_ready(client), "the cluster to be ready")
    first.popen.kill()
    first.end()
    start_coordinator(launcher, f"--port={port}")
    assert "shard 0 holds rows of cluster" in shard.error_line()


@pytest.fixture
def pair(launcher: Launcher) -> tuple[Process, Process, dict[str, int]]:
    ports = {name: free_port() for name in ("control", "coordinator_metrics", "shard_metrics")}
    metrics = f"--metrics-port={ports['coordinator_metrics']}"  # and no worker here renews its lease
    coordinator, address = start_coordinator(launcher, "--port=0", "--log-format=json", metrics, "--worker-lease=5min")
    shard = start_shard(
        launcher,
        address,
        0,
        f"--control-port={ports['control']}",
        f"--metrics-port={ports['shard_metrics']}",
        "--log-format=json",
    )
    ports["coordinator"] = int(address.rpartition(":")[2])
    with ControlClient(address) as client:
        wait_until(lambda: is_ready(client), "the cluster to be ready")
        client.create_table(SCHEMA)
    return coordinator, shard, ports


def test_health_and_reflection_answer(pair: tuple[Process, Process, dict[str, int]]) -> None:
    ports = pair[2]
    for port, service in ((ports["coordinator"], "Coordinator"), (ports["control"], "Shard")):
        name = f"sparserow.v1.{service}"
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for asked in ("", name):
                answer = health.Check(health_pb2.HealthCheckRequest(service=asked), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as caught:
                health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=60)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            (listed,) = reflection.ServerReflectionInfo(iter([request]), timeout=60)
            assert name in {entry.name for entry in listed.list_services_response.service}


def test_metrics_have_a_sentence_each_and_log_lines_are_json(pair: tuple[Process, Process, dict[str, int]]) -> None:
    coordinator, shard, ports = pair
    for name, expected in (
        ("coordinator_metrics", 'sparserow_shards{state="serving"} 1.0'),
        ("coordinator_metrics", "sparserow_cluster_ready 1.0"),
        ("coordinator_metrics", "sparserow_tables 1.0"),
        ("shard_metrics", 'sparserow_ps_table_rows{shard="0",table="ads/user"} 0.0'),
        ("shard_metrics", 'sparserow_ps_rows_applied_total{shard="0"} 0.0'),
    ):
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[name]}/metrics", timeout=60) as page:
            text = page.read().decode()
        assert expected in text
        helps = [line for line in text.splitlines() if line.startswith("# HELP")]
        assert all(line.rstrip(".").endswith(")") for line in helps), helps  # each names its unit
    for process, role in ((coordinator, "coordinator"), (shard, "shard 0")):
        events = [json.loads(line) for line in process.err.splitlines()]
        assert events
        assert {event["role"] for event in events} == {role}
        assert all({"time", "level", "message"} <= event.keys() for event in events)


def test_no_server_process_holds_torch(pair: tuple[Process, Process, dict[str, int]]) -> None:
    for process in pair[:2]:
        maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
        assert "grpc" in maps  # the file lists what is loaded
        assert "torch" not in maps


def test_no_server_module_imports_torch() -> None:
    script = (
        "import importlib, pkgutil, sys\nimport sparserow.ps_server, sparserow.deploy.commands as commands\nfor "
        "package in (sparserow.ps_server,):\n    for module in pkgutil.walk_packages(package.__path__, "
        "package.__name__ + '.'):\n        importlib.import_module(module.name)\nfor name in ('coordinator', 'ps', "
        "'up', 'status'):\n    importlib.import_module(f'{commands.__name__}.{name}')\nimport "
        "sparserow.deploy.launch.single_host, "
        "sparserow.deploy.launch.local_cluster\nprint('sparserow.ps_server.shard.server' in sys.modules, 'torch' in "
        "sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_status_is_one_screen(launcher: Launcher, pair: tuple[Process, Process, dict[str, int]]) -> None:
    address = f"127.0.0.1:{pair[2]['coordinator']}"
    with ControlClient(address) as client:
        identity = client.register_worker(namespace="ads", job="ctr", rank=0, world_size=1, staleness=None)
        client.heartbeat_worker(identity, step=41)
        shown = launcher.start("status", f"--coordinator={address}")
        assert shown.end() == 0, shown.err
        client.deregister_worker(identity)
    text = shown.out
    for words in ("ready", "serving", str(pair[1].popen.pid), "16384", "ads/user", "Adagrad", "ads/ctr", "async", "41"):
        assert words in text, text


def test_tables_of_both_planes_are_dropped(pair: tuple[Process, Process, dict[str, int]]) -> None:
    with ControlClient(f"127.0.0.1:{pair[2]['coordinator']}") as client:
        client.drop_table("ads", "user")
        assert client.list_tables() == ()
        assert not client.status().shards[0].tables
        with pytest.raises(NotFound, match="no table ads/user"):
            client.drop_table("ads", "user")


def test_debug_shows_the_traceback(launcher: Launcher) -> None:
    process = launcher.start("--debug", "up", "--shards=0")
    assert process.end() == 1
    assert "Traceback" in process.err
    assert process.err.splitlines()[-1].startswith("sparserow: InvalidArgument: --shards: 0")


def test_help_names_every_command(launcher: Launcher) -> None:
    process = launcher.start("--help")
    assert process.end() == 0
    for name in ("up", "status", "coordinator", "ps"):
        assert name in process.out
    assert os.environ.get("COLUMNS") or "Usage" in process.out


def test_a_client_of_a_dead_address_says_what_to_do() -> None:
    with ControlClient(f"127.0.0.1:{free_port()}") as client, pytest.raises(SparserowError) as caught:
        client.cluster()
    assert isinstance(caught.value, Unavailable)
    assert "start it with `sparserow up`" in str(caught.value)
