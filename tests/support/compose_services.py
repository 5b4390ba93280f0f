"""The servers of deploy/compose.yaml as processes of this machine.

Their command lines stay as they are, but for what a container has of its own: the names of services are 127.0.0.1, each
port is a free one, and the volume is a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sparserow_process import free_ports

COMPOSE_FILE = Path(__file__).resolve().parents[2] / "deploy" / "compose.yaml"
VOLUME = "/shared"


def compose_services() -> dict[str, dict[str, Any]]:
    """Every service, by name."""
    services: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    return services


def server_services() -> dict[str, dict[str, Any]]:
    """The services that run the image of servers, by name."""
    return {
        name: service
        for name, service in compose_services().items()
        if service["image"].partition(":")[0] == "sparserow-server"
    }


def ports_of(service: dict[str, Any]) -> dict[str, int]:
    """The ports that a server listens on, by option."""
    pairs = (word.removeprefix("--").partition("=") for word in service["command"] if "port=" in word)
    return {option: int(value) for option, _, value in pairs}


class LocalServices:
    """The servers with free ports of this machine, and a folder in place of the volume."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._services = server_services()
        wanted = [(name, port) for name, service in self._services.items() for port in ports_of(service).values()]
        self._ports = dict(zip(wanted, free_ports(len(wanted)), strict=True))

    def address(self, target: str) -> str:
        """``127.0.0.1:PORT`` of ``SERVICE:PORT``; KeyError where that service does not listen there."""
        name, _, port = target.partition(":")
        return f"127.0.0.1:{self._ports[name, int(port)]}"

    def arguments(self, name: str) -> list[str]:
        """The command line of a service."""
        return [self._local(name, word) for word in self._services[name]["command"]]

    def environment(self, name: str) -> dict[str, str]:
        """The variables that a service sets."""
        return {key: str(value) for key, value in self._services[name].get("environment", {}).items()}

    def _local(self, name: str, word: str) -> str:
        option, equals, value = word.partition("=")
        if option.endswith("port"):
            value = str(self._ports[name, int(value)])
        elif option == "--host":
            value = "127.0.0.1"
        elif option == "--advertise":
            assert value == name, f"others find {name} under its own name"
            value = "127.0.0.1"
        elif ":" in value:
            value = self.address(value)
        elif value == VOLUME or value.startswith(f"{VOLUME}/"):
            value = f"{self._volume}{value.removeprefix(VOLUME)}"
        return f"{option}{equals}{value}"
