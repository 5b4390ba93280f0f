"""What ``sparserow doctor`` looks at beyond the machine: certificates, and the cluster that it shall belong to."""

from __future__ import annotations

import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...cpp_ext import _server
from ...proto.control import ControlClient
from ...proto.errors import SparserowError
from ...proto.security.security import Security
from ...worker.membership.shard_client import shard_client
from .health_checks import Finding

_SOON_SEC = 14 * 86400


def check_certificates(security: Security, hosts: Sequence[str], now: float | None = None) -> Iterator[Finding]:
    """Dates of the certificate, that it belongs to its key and to the authorities, and that it has each host's name.

    Args:
        security: of this process.
        hosts: names and addresses under which its servers are dialled.
        now: Unix seconds; None: the clock's.
    """
    if security.path is None:
        yield Finding("certificates", "ok", "no security file: connections are plain, which loopback alone allows")
        return
    if not security.certificate:
        yield Finding("certificates", "ok", f"{security.path}: shows no certificate, as a client may")
        return
    begins, ends, subject = _server.certificate_facts(security.certificate)
    left = ssl.cert_time_to_seconds(ends) - (time.time() if now is None else now)
    renew = "sign another one: sparserow security certificate; it is taken without a restart"
    if left < 0:
        yield Finding("certificates", "wrong", f"{subject}: expired on {ends}", renew)
    elif left < _SOON_SEC:
        yield Finding("certificates", "warning", f"{subject}: expires in {left / 86400:.0f} days, on {ends}", renew)
    elif ssl.cert_time_to_seconds(begins) > (time.time() if now is None else now):
        yield Finding("certificates", "wrong", f"{subject}: is valid from {begins} on", "is the clock right?")
    else:
        yield Finding("certificates", "ok", f"{subject}: valid until {ends}")
    if left < 0:
        return  # a handshake would only say so again
    for host in hosts or ("",):
        problem = handshake_problem(security, host)
        if problem:
            remedy = (
                f"sign one that names {host}" if host else "cert, key and ca of the security file must belong together"
            )
            yield Finding("certificates", "wrong", f"{host or subject}: {problem}", remedy)
        elif host:
            yield Finding("certificates", "ok", f"clients that dial {host} accept it")
        else:
            yield Finding("certificates", "ok", "it is of the authorities that are trusted; --host NAME checks names")


def handshake_problem(security: Security, host: str) -> str:
    """Why a client with these authorities would refuse a server with this certificate; empty when it would not.

    Args:
        security: of both.
        host: that the client dials; empty: it does not compare names.
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
    """Whether the coordinator answers, every shard serves, and every data plane takes this process in.

    Raises:
        InvalidArgument: the address is none.
    """
    with ControlClient(address, deadline_sec=5.0, security=security) as client:
        try:
            reply = client.status()
        except SparserowError as error:
            yield Finding("cluster", "wrong", str(error), "is it started, its port open, and this the right token?")
            return
        yield Finding("cluster", "ok", f"coordinator {address}: cluster {reply.cluster_id:016x}")
        for shard in reply.shards:
            if shard.problem:
                yield Finding("cluster", "wrong", f"shard {shard.shard}: {shard.problem}", "look at its log")
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
                "cluster", "wrong", str(error), "is the data port open, and the address that it advertises right?"
            )
            return
    del native
    yield Finding("cluster", "ok", f"{len(view.shards)} shards take connections from here")
