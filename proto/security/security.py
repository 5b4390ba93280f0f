"""The identity of a process and the certificates that it trusts: a YAML file for clients and servers, and one of
tokens.

``security.yaml`` (paths are relative to it)::

    ca: ca.pem              # the trusted authority; without it connections are plain
    cert: server.pem        # shown by servers, and by clients where a server asks for one
    key: server.key
    client_ca: ca.pem       # servers accept only clients with a certificate of these authorities
    token_file: token       # shown to servers
    tokens: tokens.yaml     # accepted clients: the file that `sparserow token` writes
    verification_key: publisher.pub  # public keys of the publishers whose programs may be loaded
    signing_key: publisher.key       # signs the programs that are published
    limits:                 # what servers let clients hold
      client_connections: 64
    quotas:                 # what namespaces may take (quotas.py)
      default: {tables: 100}

A process has one default identity, set where it starts (:func:`use_security`); a caller may give another one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, model_validator

from ..config.http_limits import HttpLimits
from ..errors import InvalidArgument, PermissionDenied
from ..options.document import load_config
from ..options.strict_model import Bytes, FromList, StrictModel
from .quotas import Quotas
from .signing_keys import signing_key, verification_keys

Role: TypeAlias = Literal["serve-read", "train", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)  # each role may do what the roles before it may
TOKEN_HEADER = "authorization"  # the metadata of a call that has the token
_MOST_TOKEN_BYTES = 1024
_SECRETS = frozenset({"key", "token_file", "signing_key"})  # keys of the file that name others
_OF_OTHERS = 0o027  # a group may read, because Kubernetes lets a pod read its secrets so


class Limits(StrictModel):
    """The limits that the data plane of one server sets for its clients."""

    connections: int = Field(4096, ge=1, le=1 << 20, description="Open connections of all clients.")
    client_connections: int | None = Field(
        None, ge=1, le=1 << 20, description="Open connections from one address; null: the number in connections."
    )
    frame_bytes: Bytes = Field(1 << 30, ge=64 << 10, le=(1 << 32) - 8, description="Bytes of one request or reply.")
    inflight_bytes: Bytes = Field(
        4 << 30,
        ge=64 << 10,
        description="Bytes of requests being received or worked on; further requests wait for room.",
    )
    reply_bytes: Bytes = Field(
        2 << 30,
        ge=64 << 20,
        description="Bytes of replies being made or sent; further replies wait until others are received.",
    )
    client_inflight_bytes: Bytes | None = Field(
        None, ge=64 << 10, description="Part of inflight_bytes that one address may use; null: all of it."
    )
    http: HttpLimits = Field(HttpLimits(), description="Limits of the HTTP endpoints.")

    @model_validator(mode="after")
    def _room_for_a_frame(self) -> Limits:
        for name in ("inflight_bytes", "client_inflight_bytes"):
            value = getattr(self, name)
            if value is not None and value < self.frame_bytes:
                raise InvalidArgument(f"{name}: {value} is less than frame_bytes; allowed: at least {self.frame_bytes}")
        return self

    def native(self) -> dict[str, int]:
        """Returns the limits as arguments of the native server; 0 stands for no limit."""
        return {
            "max_connections": self.connections,
            "max_client_connections": self.client_connections or 0,
            "max_frame_bytes": self.frame_bytes,
            "inflight_budget_bytes": self.inflight_bytes,
            "reply_budget_bytes": self.reply_bytes,
            "client_inflight_bytes": self.client_inflight_bytes or 0,
        }


class SecurityFile(StrictModel):
    """The security file, which names certificates and tokens."""

    ca: str | None = Field(None, description="PEM file of authorities to trust; null: connections are plain.")
    cert: str | None = Field(None, description="PEM file of the certificate to show, with intermediate ones after it.")
    key: str | None = Field(None, description="PEM file, mode 0600 or 0640, of its private key, without a passphrase.")
    client_ca: str | None = Field(
        None, description="PEM file of authorities; servers accept only clients with a certificate of these."
    )
    token_file: str | None = Field(None, description="File, mode 0600 or 0640, of the token to show to servers.")
    token_in_clear: bool = Field(
        False,
        description="Whether the token may be shown on plain connections, where other machines on the network can read "
        "it.",
    )
    tokens: str | None = Field(
        None, description="File of the tokens that servers accept; null: servers accept every client that reaches them."
    )
    verification_key: str | None = Field(
        None, description="PEM file of publishers' public keys; programs without a signature of these are refused."
    )
    signing_key: str | None = Field(
        None, description="PEM file, mode 0600 or 0640, of the private key that signs published programs."
    )
    limits: Limits = Field(Limits(), description="What servers let clients hold.")
    quotas: Quotas = Field(Quotas(), description="What namespaces may take of the cluster.")

    @model_validator(mode="after")
    def _whole(self) -> SecurityFile:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("cert and key belong together; give both or none")
        if self.client_ca is not None and self.cert is None:
            raise InvalidArgument("client_ca has no effect without cert; give a certificate or remove it")
        if self.token_file is not None and self.ca is None and not self.token_in_clear:
            raise InvalidArgument(
                "token_file without ca would send the token in clear; allowed: name ca, or set token_in_clear: true "
                "where no other process can read the network"
            )
        if self.cert is not None and self.ca is None:
            raise InvalidArgument(
                "ca is missing: a process that shows a certificate also dials others, and needs an authority to trust"
            )
        return self


class TokenEntry(StrictModel):
    """One token of the tokens file, which has its digest and never the token itself."""

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f]{1,255}$", description="Name of the token in logs.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the token in hexadecimal digits.")
    role: Role = Field(description="What the token permits; each role includes the roles before it.")
    namespaces: Annotated[tuple[str, ...], FromList] | None = Field(
        None, description="Namespaces whose tables the token reaches; null: all; []: none."
    )


class TokensFile(StrictModel):
    """The tokens that a server accepts."""

    # There is no default, because a file that is empty for a moment would take back every token.
    tokens: Annotated[tuple[TokenEntry, ...], FromList] = Field(description="One entry for each token; []: none.")


@dataclass(frozen=True)
class Security:
    """The contents of a security file, and of the files that it names, when they were read.

    Attributes:
        path: the path of the security file; None means no security.
        authorities, certificate, key, client_authorities: texts in PEM, empty where there is none.
        token: the token to show to servers; empty means none.
        tokens: the tokens that a server accepts; None means that it asks for none.
        verification_key, signing_key: the keys of publishers as texts in PEM, empty where there is none.
        limits: the limits that servers set for clients; those of a server's start count.
        quotas: what namespaces may take of the cluster.
        files: the paths of all files that were read.
    """

    path: Path | None = None
    authorities: str = ""
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    client_authorities: str = ""
    token: str = field(default="", repr=False)
    tokens: tuple[TokenEntry, ...] | None = None
    verification_key: str = ""
    signing_key: str = field(default="", repr=False)
    limits: Limits = field(default_factory=Limits)
    quotas: Quotas = field(default_factory=Quotas, hash=False)  # it has a dict
    files: tuple[Path, ...] = ()

    @staticmethod
    def load(path: str | Path) -> Security:
        """Reads a security file and the files that it names.

        Raises:
            InvalidArgument: a file cannot be read, or its content is not allowed; the text names the file and the key.
        """
        path = Path(path)
        config = load_config(SecurityFile, path)
        files = [path]

        def text_of(key: str) -> str:
            name = getattr(config, key)
            if name is None:
                return ""
            files.append(path.parent / name)
            try:
                with files[-1].open(encoding="utf-8") as file:
                    if key in _SECRETS and os.fstat(file.fileno()).st_mode & _OF_OTHERS:
                        raise InvalidArgument(
                            f"{path}: {key}: {files[-1]}: others may read or change it; allowed: mode 0600, or 0640"
                        )
                    return file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidArgument(f"{path}: {key}: {files[-1]} cannot be read: {error}") from None

        verification_key, private_key = text_of("verification_key"), text_of("signing_key")
        if config.verification_key is not None:
            verification_keys(verification_key)
        if config.signing_key is not None:
            signing_key(private_key)
        token = text_of("token_file").strip()
        if config.token_file is not None and not 0 < len(token.encode()) <= _MOST_TOKEN_BYTES:
            raise InvalidArgument(f"{path}: token_file: allowed: a token of 1 to {_MOST_TOKEN_BYTES} bytes")
        tokens = None
        if config.tokens is not None:
            files.append(path.parent / config.tokens)
            tokens = load_config(TokensFile, files[-1]).tokens
        return Security(
            path=path,
            authorities=text_of("ca"),
            certificate=text_of("cert"),
            key=text_of("key"),
            client_authorities=text_of("client_ca"),
            token=token,
            tokens=tokens,
            verification_key=verification_key,
            signing_key=private_key,
            limits=config.limits,
            quotas=config.quotas,
            files=tuple(files),
        )

    @property
    def protects_listeners(self) -> bool:
        """Whether a server with this identity may listen on public addresses: it has TLS and asks for a token."""
        return bool(self.certificate) and self.tokens is not None

    def native_client(self) -> dict[str, Any]:
        """Returns the arguments ``tls`` and ``token`` of the native clients."""
        tls = (self.authorities, self.certificate, self.key) if self.authorities else None
        return {"tls": tls, "token": self.token}

    def native_server(self) -> dict[str, Any]:
        """Returns the arguments ``tls`` and ``grants`` of the native server, and its limits."""
        tls = (self.client_authorities, self.certificate, self.key) if self.certificate else None
        grants = None
        if self.tokens is not None:
            grants = [(bytes.fromhex(entry.sha256), entry.role, _native_namespaces(entry)) for entry in self.tokens]
        return {"tls": tls, "grants": grants, **self.limits.native()}

    def give_to(self, server: Any) -> None:
        """Gives a running native server certificates for new connections, and tokens from the next request on.

        Raises:
            InvalidArgument: a text is not a certificate or key. The server is unchanged then.
        """
        arguments = self.native_server()
        server.set_tls(arguments["tls"])
        server.set_grants(arguments["grants"])

    def grant_of(self, token: str) -> TokenEntry:
        """Returns what a token permits on this server.

        Raises:
            PermissionDenied: the server does not accept the token.
        """
        if self.tokens is None:
            return TokenEntry(name="anyone", sha256="0" * 64, role="admin")
        digest = digest_of(token)
        for entry in self.tokens:
            if hmac.compare_digest(entry.sha256, digest):
                return entry
        raise PermissionDenied("token: the token is missing, or not one that this server knows")


def _native_namespaces(entry: TokenEntry) -> list[str]:
    """Returns the namespaces as the native server has them: it takes an empty list for all, and no name is empty."""
    return [] if entry.namespaces is None else list(entry.namespaces) or [""]


def check_certificates(security: Security) -> None:
    """Refuses certificates that are none, or do not belong to their key, before connections are made with them.

    Raises:
        InvalidArgument: one is none; the text names the file's key.
    """
    for key, text in (("ca", security.authorities), ("client_ca", security.client_authorities)):
        if text:
            try:
                ssl.create_default_context(cadata=text)
            except ValueError as error:  # also ssl.SSLError
                raise InvalidArgument(f"{security.path}: {key}: no certificates of authorities: {error}") from None
            except OSError as error:
                raise InvalidArgument(f"{security.path}: {key}: no certificates of authorities: {error}") from None
    if security.certificate:
        with tempfile.TemporaryDirectory(prefix="sparserow-") as folder:  # ssl reads them from files alone; mode 0700
            certificate, private = Path(folder) / "cert", Path(folder) / "key"
            certificate.write_text(security.certificate)
            private.write_text(security.key)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private, "")
            except OSError as error:  # also ssl.SSLError
                raise InvalidArgument(f"{security.path}: cert, key: {error}") from None


def reaches_namespace(grant: TokenEntry, namespace: str) -> bool:
    """Whether a token permits actions on a namespace; null stands for all."""
    return grant.namespaces is None or namespace in grant.namespaces


def check_namespace(grant: TokenEntry, namespace: str) -> None:
    """Refuses a namespace that the token does not reach.

    Raises:
        PermissionDenied: the token does not reach the namespace; the text names it.
    """
    if not reaches_namespace(grant, namespace):
        raise PermissionDenied(f"token: the token does not reach namespace {namespace!r}")


def digest_of(token: str) -> str:
    """Returns the SHA-256 of a token in hexadecimal digits, which a tokens file has in place of the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def bearer_token(metadata: Any) -> str:
    """Returns the token in a call's metadata; empty when there is none."""
    for key, value in metadata or ():
        if key == TOKEN_HEADER:
            scheme, _, token = str(value).partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return ""


_NONE = Security()
_process = _NONE


def use_security(security: Security | str | Path | None) -> Security:
    """Sets and returns the identity of this process, which every connection shows that is given no other.

    Args:
        security: the identity, or the path of a security file; None means plain connections without a token.

    Raises:
        InvalidArgument: as for :meth:`Security.load`.
    """
    global _process
    _process = loaded_security(security) if security is not None else _NONE
    return _process


def process_security() -> Security:
    """Returns the identity of this process."""
    return _process


def loaded_security(security: Security | str | Path | None) -> Security:
    """Returns ``security``, which is read when it is a path; None stands for the identity of the process.

    Raises:
        InvalidArgument: as for :meth:`Security.load`.
    """
    if security is None:
        return _process
    return security if isinstance(security, Security) else Security.load(security)
