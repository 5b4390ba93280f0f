"""Checks certificates and a cluster for ``sparserow doctor``."""

from __future__ import annotations

import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...cpp_ext import _server
from ...proto.control import ControlClient
from ...proto.errors import SparserowError
from ...proto.security.security import Security
from ...worker.membership.shard_client import shard_client
from .finding import Finding
from .memory_nodes import memory_nodes_finding

_SOON_SEC = 14 * 86400
_TRANSPORTS = {
    "shm": "through shared memory",
    "unix": "by a Unix socket without shared memory",
    "tcp": "by TCP",
    "tls": "by TLS",
    "none": "lost since",
}
_LEAST_SLOTS = 64  # as many as a shard has stripes (slot_order.h)


def check_certificates(security: Security, hosts: Sequence[str], now: float | None = None) -> Iterator[Finding]:
    """Checks the dates of the certificate, its key, its authority, and that it has the name of each host.

    Args:
        security: the security of this process.
        hosts: the names and addresses under which clients reach its servers.
        now: the present time in Unix seconds; None reads the clock.
    """
    if security.path is None:
        yield Finding(
            "certificates", "ok", "no security file: connections are plain, which is allowed only on loopback"
        )
        return
    if not security.certificate:
        yield Finding("certificates", "ok", f"{security.path}: no certificate is shown, which clients may do")
        return
    begins, ends, subject = _server.certificate_facts(security.certificate)
    left = ssl.cert_time_to_seconds(ends) - (time.time() if now is None else now)
    renew = "sign another certificate: sparserow security certificate; servers use it without a restart"
    if left < 0:
        yield Finding("certificates", "wrong", f"{subject}: expired on {ends}", renew)
    elif left < _SOON_SEC:
        yield Finding("certificates", "warning", f"{subject}: expires in {left / 86400:.0f} days, on {ends}", renew)
    elif ssl.cert_time_to_seconds(begins) > (time.time() if now is None else now):
        yield Finding(
            "certificates", "wrong", f"{subject}: the certificate is valid from {begins} on", "is the clock right?"
        )
    else:
        yield Finding("certificates", "ok", f"{subject}: valid until {ends}")
    if left < 0:
        return  # a handshake would only report the same
    for host in hosts or ("",):
        problem = handshake_problem(security, host)
        if problem:
            remedy = (
                f"sign a certificate that names {host}"
                if host
                else "cert, key and ca of the security file must belong together"
            )
            yield Finding("certificates", "wrong", f"{host or subject}: {problem}", remedy)
        elif host:
            yield Finding("certificates", "ok", f"clients of {host} accept the certificate")
        else:
            yield Finding("certificates", "ok", "a trusted authority has signed it; --host NAME checks names")


def handshake_problem(security: Security, host: str) -> str:
    """Returns why a client with these authorities would refuse a server with this certificate; empty when it would not.

    Args:
        security: the security of the client and of the server.
        host: the host that the client connects to; empty when it does not compare names.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="sparserow-") as folder:
            pair = Path(folder) / "pair.pem"
            pair.touch(0o600)
            pair.write_text(security.key + "\n" + security.certificate)
            server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server_side.load_cert_chain(pair)
        client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client_side.check_hostname = bool(host)
        client_side.load_verify_locations(cadata=security.authorities)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_side.wrap_bio(to_client, to_server, server_hostname=host or None)
        server = server_side.wrap_bio(to_server, to_client, server_side=True)
        waits = [client, server]
        for _ in range(10):  # a handshake has three flights
            for each in list(waits):
                try:
                    each.do_handshake()
                    waits.remove(each)
                except ssl.SSLWantReadError:
                    continue
            if not waits:
                return ""
        return "the handshake does not end"
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return str(error.reason or error).replace("_", " ").lower()


def check_cluster(address: str, security: Security) -> Iterator[Finding]:
    """Checks that the coordinator answers, every shard serves, and every data plane accepts this process.

    Raises:
        InvalidArgument: the address is not of the form HOST:PORT.
    """
    with ControlClient(address, deadline_sec=5.0, security=security) as client:
        try:
            reply = client.status()
        except SparserowError as error:
            yield Finding(
                "cluster", "wrong", str(error), "check that it runs, that its port is open, and that the token is right"
            )
            return
        yield Finding("cluster", "ok", f"coordinator {address}: cluster {reply.cluster_id:016x}")
        for shard in reply.shards:
            if shard.problem:
                yield Finding("cluster", "wrong", f"shard {shard.shard}: {shard.problem}", "read its log")
        if not reply.ready:
            missing = "start what is missing: sparserow ps --shard=N"
            remedy = "sparserow checkpoint restore URL" if reply.problem == reply.damage else missing
            yield Finding("cluster", "wrong", reply.problem, remedy)
            return
        try:
            view = client.cluster()
            native = shard_client(view, security, connect_timeout_ms=5000)
        except SparserowError as error:
            yield Finding(
                "cluster",
                "wrong",
                str(error),
                "check that the data port is open, and that the advertised address is right",
            )
            return
    transports = native.transports()
    del native
    found = Counter(_TRANSPORTS[each] for each in transports)
    ways = ", ".join(f"{count} {way}" for way, count in found.items())
    yield Finding("cluster", "ok", f"{len(view.shards)} shards accept connections from here: {ways}")
    shared = [shard for shard, transport in enumerate(transports) if transport == "shm"]
    yield from memory_nodes_finding({status.shard: status.pid for status in reply.shards if status.shard in shared})
    yield from slots_finding(reply.slot_count, len(view.shards))


def slots_finding(slots: int, shards: int) -> Iterator[Finding]:
    """Warns where shards have so few slots that rows cannot be spread, moved or locked evenly.

    Args:
        slots: the number of slots of the cluster.
        shards: the number of shards that share them.
    """
    if slots < _LEAST_SLOTS * shards:
        yield Finding(
            "cluster",
            "warning",
            f"{slots} slots for {shards} shards; a shard wants at least {_LEAST_SLOTS}, one for each of its stripes",
            f"make the next cluster with --slot-count={min(65536, 1 << (_LEAST_SLOTS * shards - 1).bit_length())}",
        )
