"""Runs a cluster on Ray for ``sparserow up --on``, for as long as this process runs."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

from ...proto.errors import FailedPrecondition, SparserowError, Unavailable
from ...proto.extras import install_command
from .cluster import RayCluster, RayOptions, ray_cluster, require_ray
from .supervisor import ServerState

_LOOK_SEC = 1.0
_LISTENS_SEC = 10.0  # the time for a first connection to Ray


def run_on_ray(address: str, options: RayOptions) -> None:
    """Starts a cluster, reports the addresses of its servers, and stops it on SIGTERM or Ctrl-C.

    Args:
        address: the address of Ray: ``auto``, ``ray://HOST:PORT`` or ``HOST:PORT``.
        options: the options of the cluster.

    Raises:
        Unavailable: there is no Ray at ``address``.
        SparserowError: as for ``start_on_ray``.
    """
    with connected(address, "--on"), ray_cluster(options) as running:
        known = {state.name: state for state in running.states()}
        for state in known.values():
            if state.address:
                print(f"sparserow: {state.name} at {state.address}, node {state.node[:8]}")
        print(f"sparserow: ready at {running.address} (Ctrl-C stops it)", flush=True)
        _watch(running, known)
    print("sparserow: stopped", flush=True)


def _watch(running: RayCluster, known: dict[str, ServerState]) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(_LOOK_SEC):
        for state in running.states():
            if state.address != known[state.name].address:
                where = f"at {state.address}, node {state.node[:8]}" if state.address else "away"
                why = f" ({state.last_words})" if state.last_words and not state.address else ""
                print(f"sparserow: {state.name} is {where}{why}", flush=True)
            known[state.name] = state


def _check_listens(address: str, named: str) -> None:
    """Raises Unavailable when nothing listens at an address with a port, because Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # `auto`, or an address that Ray finds out about
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENS_SEC).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(f"{named} {address}: Ray cannot be reached: {error}") from None


@contextlib.contextmanager
def connected(address: str, named: str) -> Iterator[None]:
    """Connects this process to Ray for the duration of the block.

    Args:
        address: the address of Ray: ``auto``, ``ray://HOST:PORT`` or ``HOST:PORT``.
        named: the option or the variable that has the address, for error texts.

    Raises:
        FailedPrecondition: Ray is not installed.
        Unavailable: there is no Ray at ``address``.
    """
    ray = require_ray()
    _check_listens(address, named)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except SparserowError:
        raise
    except ImportError as error:
        raise FailedPrecondition(f"{named} {address}: {error}; install it with: {install_command('ray')}") from None
    except Exception as error:  # Ray has no error class for this
        raise Unavailable(f"{named} {address}: Ray cannot be reached: {' '.join(str(error).split())[:300]}") from None
    try:
        yield
    finally:
        ray.shutdown()
