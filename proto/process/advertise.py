"""Chooses the address that a server sends other processes when it listens on every address."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from ..coordinators import parse_address
from ..errors import InvalidArgument, Unavailable, not_allowed

_FORM = "HOST or HOST:PORT, under which other processes reach this server"
_ANYWHERE = ("198.51.100.1", 9)  # belongs to no host (RFC 5737); the route to it is the one to other machines


@dataclass(frozen=True)
class Advertised:
    """The address under which other processes reach a server.

    Attributes:
        host: a name or an address, never a wildcard; IPv6 without brackets.
        port: the port; None stands for the port that the server listens on.
    """

    host: str
    port: int | None = None

    def address(self, port: int) -> str:
        """Returns ``HOST:PORT``; ``port`` is the port that the server listens on, which is used where no other was
        named.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port or port}"


def is_wildcard(host: str) -> bool:
    """Whether a server that listens on ``host`` listens on every address of its machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def parse_advertise(text: str) -> Advertised:
    """Parses the value of ``--advertise``.

    Raises:
        InvalidArgument: the text is neither HOST nor HOST:PORT, or is a wildcard.
    """
    host, port = text, ""
    if match := re.fullmatch(r"\[([^\]]+)\](?::(.*))?", text):
        host, port = match[1], match[2] if match[2] is not None else ""
        named = match[2] is not None
    elif named := text.count(":") == 1:
        host, _, port = text.partition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if is_wildcard(host) or not _is_host(host) or (named and not is_port):
        raise not_allowed("--advertise", text, _FORM)
    return Advertised(host, int(port) if named else None)


def advertised(given: str | None, listens_on: str, coordinator: str | None) -> Advertised:
    """Returns the address to send other processes.

    Args:
        given: the value of ``--advertise``. None chooses ``listens_on``, unless it is a wildcard. Then it chooses the
            address of the interface that reaches the coordinator, or without a coordinator this host's name.
        listens_on: the value of ``--host``.
        coordinator: ``HOST:PORT``; None when this is the coordinator, or there is none.

    Raises:
        InvalidArgument: ``given`` is not allowed, or no address can be chosen.
        Unavailable: no interface reaches the coordinator.
    """
    if given is not None:
        return parse_advertise(given)
    if not is_wildcard(listens_on):
        return Advertised(listens_on)
    if coordinator is not None:
        host, port = parse_address(coordinator, what="--coordinator")
        try:
            return Advertised(_interface_towards(host, port))
        except OSError as error:
            raise Unavailable(
                f"coordinator {coordinator}: no interface of this host reaches it ({error.strerror}); name with "
                "--advertise the address under which other processes reach this server"
            ) from None
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        return Advertised(name)
    except OSError:
        try:
            return Advertised(_interface_towards(*_ANYWHERE))
        except OSError:
            raise InvalidArgument(
                f"--host {listens_on}: a wildcard is no address for other processes, and this host's name {name!r} "
                "does not resolve; name with --advertise the address under which other processes reach this server"
            ) from None


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?", host) is not None
    return True


def _interface_towards(host: str, port: int) -> str:
    """Returns this host's address of packets to ``host``; no packet is sent."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
