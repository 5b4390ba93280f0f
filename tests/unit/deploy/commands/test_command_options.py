"""What a parent hands to its child processes, and what flags mean, without the command line's framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sparserow as sr
from sparserow.deploy.commands.model_options import HANDED_DOWN, Fields
from sparserow.proto.config.cluster_config import ClusterConfig
from sparserow.proto.options.document import validate
from sparserow.ps_server.coordinator.state.cluster import ClusterOptions
from sparserow.ps_server.shard.engine import EngineOptions
from sparserow.serving.process import memory_of, place_of
from sparserow.serving.serve_config import ServeConfig

CLUSTER = Fields(ClusterConfig, is_handed_down=True)
SET: dict[str, Any] = {
    "shards": 3,
    "memory_budget": 32 << 20,
    "ssd_path": "/ssd/a b",
    "ssd_bytes": 64 << 20,
    "ssd_engine": "pages",
    "ssd_direct_io": True,
    "sweep_every": None,
    "port": 7001,
    "slot_count": 64,
    "io_threads": 5,
    "worker_lease": 1.5,
    "shard_lease": 2.5,
    "checkpoint_roots": ["/ckpt", "s3://bucket/rows"],
}


def test_a_child_has_the_whole_configuration_of_its_parent() -> None:
    assert {*SET, "address"} == {*ClusterConfig.model_fields}, "name the new key here, so that it is seen to arrive"
    config = validate(ClusterConfig, SET)
    assert CLUSTER.section({HANDED_DOWN: config.handed_down()}) == config
    defaults = validate(ClusterConfig, {})
    assert CLUSTER.section({HANDED_DOWN: defaults.handed_down(), "shards": 7}) == defaults


def test_a_configuration_that_is_handed_down_is_checked_as_flags_are() -> None:
    for given, words in (
        ({HANDED_DOWN: '{"shards": 0}'}, "--cluster-json: shards: 0 is not allowed"),
        ({"shards": 0}, "--shards: 0 is not allowed; allowed: an integer >= 1 and <= 1024"),
        ({HANDED_DOWN: "[1, 2]"}, "--cluster-json"),
        ({HANDED_DOWN: "{"}, "--cluster-json: the value is not JSON"),
    ):
        with pytest.raises(sr.errors.InvalidArgument, match=words):
            CLUSTER.section(given)


def test_a_shard_and_a_coordinator_take_all_of_it() -> None:
    config = validate(ClusterConfig, SET)
    assert EngineOptions.of_cluster(config, 1, "::1", 9, observe=False) == EngineOptions(
        shard=1,
        host="::1",
        port=9,
        memory_budget_bytes=32 << 20,
        io_threads=5,
        ssd_path="/ssd/a b",
        ssd_bytes=64 << 20,
        ssd_engine="pages",
        ssd_direct_io=True,
        sweep_every_sec=None,
        observe=False,
    )
    cluster = ClusterOptions.of_config(config, is_loopback=True, job_memory_sec=7.0)
    assert (cluster.shards, cluster.slot_count, cluster.worker_lease_sec, cluster.shard_lease_sec) == (3, 64, 1.5, 2.5)
    assert cluster.job_memory_sec == 7.0
    assert cluster.checkpoint_roots.check("s3://bucket/rows/x") == "s3://bucket/rows/x"
    with pytest.raises(sr.errors.SparserowError):
        cluster.checkpoint_roots.check("/elsewhere")


def test_peers_stand_with_commas_or_one_by_one() -> None:
    for peers in ("a:1,b:2", ["a:1,b:2"], ["a:1", "b:2"]):  # a command line gives a list
        assert serve_config(model=["ctr"], root="/models", shard="0/2", peers=peers).peers == ("a:1", "b:2")


def serve_config(**flags: Any) -> ServeConfig:
    config: ServeConfig = Fields(ServeConfig).section(flags)
    return config


def test_flags_of_serve() -> None:
    options = serve_config(
        model=["ctr@live", "rank"],
        root="/models",
        shard="1/2",
        replica=3,
        peers="a:1,b:2",
        follow="c:3",
        memory_budget="64MiB",
        sync_interval="50ms",
        sync_after_updates=4,
        sync_max_delay="2s",
        poll="250ms",
        grace="1min",
    )
    assert (options.model, options.peers, options.follow) == (("ctr@live", "rank"), ("a:1", "b:2"), "c:3")
    place = place_of(options)
    assert (place.shard, place.shards, place.replica) == (1, 2, 3)
    assert memory_of(options).budget_bytes == 64 << 20
    assert (options.sync_interval, options.poll_sec, options.grace) == (0.05, 0.25, 60.0)
    assert (options.sync_after_updates, options.longest_sec) == (4, 2.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": []}, "--model: () is not allowed; allowed: NAME"),
        ({"root": None}, "--root: is missing; name the folder"),
        ({"root": " "}, "--root: ' ' is empty"),
        ({"namespace": "n"}, "--namespace has no effect with --root"),
        ({"poll": "0s"}, "--poll: '0s' is not allowed; allowed: "),
        ({"peers": "a:1"}, "--peers has no effect with one shard"),
        ({"peers": "a", "shard": "0/2"}, "--peers"),
        ({"shard": "2/2"}, "2/2"),
        ({"shard": "first"}, "--shard: 'first' is not allowed"),
        ({"port": 70_000}, "--port: 70000 is not allowed; allowed: an integer >= 0 and <= 65535"),
        ({"io_threads": 0}, "--io-threads: 0 is not allowed"),
        ({"metrics_port": -1}, "--metrics-port: -1 is not allowed"),
        ({"sync_max_delay": "1s"}, "--sync-max-delay has no effect without --sync-after-updates or --sync-after-move"),
        ({"sync_after_updates": 2}, "--sync-after-updates and --sync-after-move have no effect without --follow"),
        ({"sync_interval": "1s"}, "--sync-interval has no effect without --follow"),
        ({"ssd_path": "/"}, "--ssd-path: it needs --memory-budget"),
        ({"memory_budget": "much"}, "--memory-budget: 'much' is not allowed; allowed: bytes"),
        ({"grace": "soon"}, "--grace: 'soon' is not allowed"),
    ],
)
def test_flags_of_serve_that_are_refused(flags: dict[str, Any], words: str) -> None:
    def checked() -> None:
        config = serve_config(**{"model": ["ctr"], "root": "/models", **flags})
        place_of(config)
        memory_of(config)

    with pytest.raises(sr.errors.InvalidArgument) as error:
        checked()
    assert words in str(error.value)


def test_commands_of_children_name_no_option_of_the_cluster() -> None:
    """A new option of the cluster reaches children without a change here."""
    folder = Path(sr.__file__).resolve().parent / "deploy"
    asked_for = {"port", "shards"}  # each server's own port; the coordinator's command asks for its shards
    wrong = []
    for source in ("launch/local_cluster.py", "launch/single_host.py", "ray/cluster.py"):
        text = (folder / source).read_text()
        if "--cluster-json=" not in text:
            wrong.append(f"{source} hands no --cluster-json= down")
        options = [f"--{key.replace('_', '-')}=" for key in SET if key not in asked_for]
        wrong += [f"{source} names {option}" for option in options if option in text]
    assert not wrong, "\n".join(wrong)
