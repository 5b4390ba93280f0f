"""Makes the security files of a cluster: a small authority of its own, certificates and tokens."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import yaml

from ...cpp_ext import _server
from ...proto.errors import FailedPrecondition, InvalidArgument, NotFound, not_allowed
from ...proto.options.document import load_config, validate
from ...proto.process.whole_file import write_whole
from ...proto.security.security import (
    Role,
    Security,
    TokenEntry,
    TokensFile,
    digest_of,
    process_security,
)
from ...proto.security.signing_keys import make_key_pair

_AUTHORITY_SEC = 10 * 365 * 86400


def security_arguments() -> list[str]:
    """Returns the arguments that pass the security file to a ``sparserow`` process; empty without a security file.

    They stand before the command.
    """
    path = process_security().path
    return [] if path is None else [f"--security={path.resolve()}"]


def init_security(folder: Path, hosts: Sequence[str], *, valid_sec: int) -> Path:
    """Makes an authority, a certificate for servers, an admin token and the security file that names them.

    Args:
        folder: a new or empty folder.
        hosts: the names and addresses under which clients reach the servers.
        valid_sec: the validity of the certificate, in seconds; the authority is valid for ten years.

    Returns:
        The path of ``security.yaml``.

    Raises:
        FailedPrecondition: the folder has files already.
        InvalidArgument: a host is neither a name nor an address, or the folder cannot be written.
    """
    names = certificate_names(hosts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FailedPrecondition(f"{folder}: the folder has files already; name a new folder")
        authority = _server.make_authority("sparserow", _AUTHORITY_SEC)
        certificate = _server.sign_certificate(authority, hosts[0], names, valid_sec=valid_sec)
        _write(folder / "ca.pem", authority[0])
        _write(folder / "ca.key", authority[1], secret=True)
        _write(folder / "server.pem", certificate[0])
        _write(folder / "server.key", certificate[1], secret=True)
        token = add_token(folder / "tokens.yaml", "servers and operators", "admin", ())
        _write(folder / "token", token + "\n", secret=True)
        _write(
            folder / "security.yaml",
            "ca: ca.pem\ncert: server.pem\nkey: server.key\ntoken_file: token\ntokens: tokens.yaml\n",
        )
    except OSError as error:
        raise InvalidArgument(f"{folder}: the folder cannot be written: {error}") from None
    return folder / "security.yaml"


def sign_certificate(folder: Path, name: str, hosts: Sequence[str], *, valid_sec: int) -> tuple[Path, Path]:
    """Signs another certificate with the folder's authority, and writes ``NAME.pem`` and ``NAME.key``.

    An older certificate of that name is replaced.

    Args:
        folder: the folder of the authority.
        name: the name of the files, and the subject of the certificate.
        hosts: the names and addresses under which clients reach the servers.
        valid_sec: the validity of the certificate, in seconds.

    Returns:
        The paths of the certificate and of its key.

    Raises:
        InvalidArgument: the name or a host is not allowed, or the folder has no authority.
    """
    if not re.fullmatch(r"[\w.-]{1,64}", name) or name in ("ca", ".", ".."):
        raise not_allowed("name", name, "letters, digits, _ . -, and not ca")
    names = certificate_names(hosts)
    try:
        authority = ((folder / "ca.pem").read_text(), (folder / "ca.key").read_text())
        certificate = _server.sign_certificate(authority, name, names, valid_sec=valid_sec)
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        _write(paths[1], certificate[1], secret=True)
        _write(paths[0], certificate[0])
    except OSError as error:
        raise InvalidArgument(f"{folder}: {error}; `sparserow security init` makes the folder") from None
    return paths


def init_signing_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a publisher's key pair as ``NAME.key``, which only its owner can read, and ``NAME.pub``; returns their
    paths.

    Raises:
        FailedPrecondition: one of the files exists already.
        InvalidArgument: the name is not allowed, or the folder cannot be written.
    """
    if not re.fullmatch(r"[\w-][\w.-]{0,63}", name):
        raise not_allowed("name", name, "letters, digits, _ . -")
    paths = folder / f"{name}.key", folder / f"{name}.pub"
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None:
        raise FailedPrecondition(f"{existing}: the file exists already; name another key")
    private, public = make_key_pair()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(paths[0], private, secret=True)
        _write(paths[1], public)
    except OSError as error:
        raise InvalidArgument(f"{folder}: the folder cannot be written: {error}") from None
    return paths


def certificate_names(hosts: Sequence[str]) -> str:
    """Returns hosts in the form in which a certificate names them.

    Raises:
        InvalidArgument: ``hosts`` is empty, or a host is neither a name nor an address.
    """
    if not hosts:
        raise InvalidArgument(
            "--host: the option is missing; allowed: names and addresses under which clients reach the servers"
        )
    names = []
    for host in hosts:
        with contextlib.suppress(ValueError):
            names.append(f"IP:{ipaddress.ip_address(host)}")
            continue
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251})", host):
            raise not_allowed("--host", host, "a DNS name or an IP address")
        names.append(f"DNS:{host}")
    return ",".join(names)


def add_token(path: Path, name: str, role: Role, namespaces: Sequence[str], *, output: Path | None = None) -> str:
    """Makes a token, adds its digest to a tokens file, and returns the token.

    The tokens file is created when there is none.

    Args:
        path: the tokens file.
        name: the name of the token in logs.
        role: the role of the token.
        namespaces: the namespaces that the token reaches; empty means all.
        output: a file for the token, which only its owner can read; a former one is replaced. None writes none.

    Raises:
        FailedPrecondition: the file has a token of that name.
        InvalidArgument: the file, the role or a namespace is not allowed.
    """
    entries = read_tokens(path) if path.exists() else ()
    if any(entry.name == name for entry in entries):
        raise FailedPrecondition(f"{path}: the file has a token named {name!r}; revoke that token first")
    token = secrets.token_urlsafe(32)
    entry = validate(
        TokenEntry, {"name": name, "sha256": digest_of(token), "role": role, "namespaces": list(namespaces) or None}
    )
    if output is not None:  # first, because a token that cannot be written must not be accepted
        _write(output, token + "\n", secret=True)
    _write_tokens(path, (*entries, entry))
    return token


def revoke_token(path: Path, name: str) -> None:
    """Removes a token's digest from a tokens file; servers refuse the token within seconds.

    Raises:
        NotFound: there is no token of that name; the text lists the existing ones.
    """
    entries = read_tokens(path)
    kept = tuple(entry for entry in entries if entry.name != name)
    if len(kept) == len(entries):
        raise NotFound(
            f"{path}: the file has no token named {name!r}; it has: {', '.join(e.name for e in entries) or 'none'}"
        )
    _write_tokens(path, kept)


def read_tokens(path: Path) -> tuple[TokenEntry, ...]:
    """Returns the tokens of a file.

    Raises:
        InvalidArgument: the file cannot be read, or is not a tokens file.
    """
    return load_config(TokensFile, path).tokens


def describe_security(security: Security) -> list[tuple[str, str]]:
    """Returns (thing, state) pairs that describe a security file to users."""
    lines = [("file", str(security.path))]
    lines.append(("connections made", "TLS, servers are checked" if security.authorities else "plain"))
    listens = "plain"
    if security.certificate:
        listens = "TLS, clients show certificates" if security.client_authorities else "TLS"
    lines.append(("connections taken", listens))
    if security.certificate:
        begins, ends, subject = _server.certificate_facts(security.certificate)
        lines.append(("certificate", f"{subject}, valid from {begins} to {ends}"))
    lines.append(("token shown", "yes" if security.token else "none"))
    lines.append(("versions loaded", "signed ones alone" if security.verification_key else "all"))
    lines.append(("versions published", "signed" if security.signing_key else "unsigned"))
    if security.tokens is None:
        lines.append(("tokens taken", "none is asked for"))
    for entry in security.tokens or ():
        reached = "all namespaces" if entry.namespaces is None else ", ".join(entry.namespaces) or "no namespace"
        lines.append(("token taken", f"{entry.name}: {entry.role}, {reached}"))
    return lines


def _write_tokens(path: Path, entries: Sequence[TokenEntry]) -> None:
    document = {"tokens": [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]}
    _write(path, yaml.safe_dump(document, sort_keys=False), secret=True)


def _write(path: Path, text: str, *, secret: bool = False) -> None:
    """Writes a file whole or not at all; a secret can be read only by its owner."""
    write_whole(path, text, mode=0o600 if secret else 0o644)
