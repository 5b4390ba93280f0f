"""Checks the addresses that a server may listen on."""

from __future__ import annotations

import ipaddress
import socket

from ..errors import InvalidArgument, Unavailable
from ..security.security import process_security


def check_host(host: str, *, insecure: bool) -> None:
    """Refuses an address that other machines can reach, unless TLS and tokens protect it or the operator accepts that.

    Args:
        host: the value of ``--host``.
        insecure: whether the operator accepts an unprotected address.

    Raises:
        InvalidArgument: ``host`` cannot be resolved, or is not loopback and neither protected nor accepted.
    """
    if insecure or process_security().protects_listeners:
        return
    if not is_loopback(host):
        raise InvalidArgument(
            f"--host {host}: the address is reachable from other machines; give certificates and tokens with "
            "--security, listen on 127.0.0.1, or accept unprotected connections with --insecure"
        )


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a server that listens on this address.

    Raises:
        InvalidArgument: ``host`` cannot be resolved.
    """
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise InvalidArgument(f"--host {host}: the name cannot be resolved: {error.strerror}") from None
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def check_port_free(host: str, port: int, *, option: str = "--port") -> None:
    """Raises an error that names the cause, before a server fails on a taken port; port 0 is always free.

    Args:
        host, port: the address to check.
        option: the option that sets the port, for the error message.

    Raises:
        Unavailable: another process listens there, or the port may not be used.
    """
    if port == 0:
        return
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror}; "
                f"stop the process that uses it, or choose another port with {option} (0: any free one)"
            ) from None
