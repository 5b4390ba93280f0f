"""deploy/compose.yaml names files, ports, images and metrics pages that exist; tests/e2e/test_compose.py runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from compose_services import COMPOSE_FILE, VOLUME, compose_services, ports_of, server_services
from sparserow.deploy.cli import _command

FOLDER = COMPOSE_FILE.parent
SERVICES = compose_services()
SERVERS = server_services()


def prometheus() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "monitoring" / "prometheus.yaml").read_text())


def mounts(name: str) -> dict[str, str]:
    """What a service mounts, by where in the container."""
    entries = (entry.split(":") for entry in SERVICES[name].get("volumes", ()))
    return {entry[1]: entry[0] for entry in entries}


def on_this_machine(name: str, path: str) -> Path:
    """The file of the repository that a service sees at a path; fails when it mounts none there."""
    for at, source in mounts(name).items():
        if PurePosixPath(path).is_relative_to(at) and source.startswith("./"):
            return FOLDER / source / PurePosixPath(path).relative_to(at)
    raise AssertionError(f"{name} mounts nothing at {path}")


def test_it_has_a_cluster_and_what_watches_it() -> None:
    assert list(SERVERS) == ["coordinator", "ps-0", "ps-1", "serving"]
    assert set(SERVICES) - set(SERVERS) == {"worker", "prometheus", "grafana"}
    shards = [name for name, service in SERVERS.items() if service["command"][0] == "ps"]
    assert f"--shards={len(shards)}" in SERVERS["coordinator"]["command"]
    assert [f"--shard={index}" in SERVERS[name]["command"] for index, name in enumerate(shards)] == [True, True]


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_options_of_its_command_and_publishes_ports_that_it_listens_on(name: str) -> None:
    command, *words = SERVERS[name]["command"]
    known = {option for parameter in _command(command).params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words} <= known
    with _command(command).make_context(command, words):
        pass
    for entry in SERVERS[name].get("ports", ()):
        host, _, inner = entry.split(":")
        assert host == "127.0.0.1", "servers are plain, so only this machine may reach them"
        assert int(inner) in ports_of(SERVERS[name]).values()
    paths = [word.partition("=")[2] for word in words if "=/" in word]
    assert all(PurePosixPath(path).is_relative_to(VOLUME) for path in paths)


def test_images_are_those_that_the_dockerfile_makes() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    version = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["version"]
    for name in (*SERVERS, "worker"):
        build = SERVICES[name]["build"]
        assert (FOLDER / build["context"] / build["dockerfile"]).samefile(FOLDER / "Dockerfile")
        assert f" AS {build['target']}\n" in dockerfile
        assert SERVICES[name]["image"] == f"sparserow-{build['target']}:{version}"
        assert mounts(name) == {VOLUME: "shared"}
    assert f"install -d -o sparserow -g sparserow {VOLUME}" in dockerfile, "an empty volume takes this owner"
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[\w-]+/[\w-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"]), "a version, and no host"


def test_prometheus_scrapes_the_metrics_page_of_each_server() -> None:
    (job,) = prometheus()["scrape_configs"]
    (static,) = job["static_configs"]
    assert static["targets"] == [f"{name}:{ports_of(service)['metrics-port']}" for name, service in SERVERS.items()]
    assert job["honor_labels"] is True
    assert on_this_machine("prometheus", "/etc/prometheus/prometheus.yml").samefile(
        FOLDER / "monitoring" / "prometheus.yaml"
    )
    for path in prometheus()["rule_files"]:
        assert yaml.safe_load(on_this_machine("prometheus", path).read_text())["groups"]


def test_grafana_shows_the_dashboard_with_data_of_prometheus() -> None:
    (source,) = yaml.safe_load(
        on_this_machine("grafana", "/etc/grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    (published,) = SERVICES["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{published.split(':')[-1]}"
    (provider,) = yaml.safe_load(
        on_this_machine("grafana", "/etc/grafana/provisioning/dashboards/sparserow.yaml").read_text()
    )["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert provider["type"] == "file"
    assert PurePosixPath(home).parent == PurePosixPath(provider["options"]["path"])
    dashboard = json.loads(on_this_machine("grafana", home).read_text())
    assert dashboard["templating"]["list"][0]["query"] == source["type"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_the_settings_of_prometheus(tmp_path: Path) -> None:
    settings = prometheus()
    settings["rule_files"] = [str(on_this_machine("prometheus", path)) for path in settings["rule_files"]]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
