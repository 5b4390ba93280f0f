"""Checks the rights of calls to the control plane, and makes the credentials of its servers."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import grpc

from ..errors import InvalidArgument, PermissionDenied
from ..security.security import (
    ROLES,
    Role,
    Security,
    TokenEntry,
    bearer_token,
    check_namespace,
    process_security,
    reaches_namespace,
)

_PREFIX = "/sparserow.v1."

# The least role of each method. A method that is not named here needs the role admin.
_METHODS: dict[Role, tuple[str, ...]] = {
    "serve-read": (
        *("Coordinator/GetCluster", "Coordinator/GetStatus", "Coordinator/ListTables"),
        *("Changes/GetVersions", "Changes/OpenCursor", "Changes/ReadChanges", "Changes/CloseCursor", "Changes/GetRow"),
        *("Serving/Lookup", "Serving/MakeKeys", "Serving/Describe", "Rows/Pull"),
    ),
    "train": (
        *("Coordinator/CreateTable", "Coordinator/DropTable", "Coordinator/DropTables", "Coordinator/SweepTable"),
        *("Coordinator/RegisterWorker", "Coordinator/WorkerHeartbeat", "Coordinator/DeregisterWorker"),
        *("Coordinator/LeaseData", "Coordinator/LeaseStream", "Coordinator/ReportFault", "Coordinator/ListFaults"),
        *("Coordinator/BeginSave", "Coordinator/EnterSave", "Coordinator/GetSave", "Coordinator/KeepRows"),
        *("Coordinator/Restore", "Rows/Push"),
    ),
}
_ROLES: dict[str, Role] = {method: role for role, methods in _METHODS.items() for method in methods}
# These methods concern the whole cluster: a token that names namespaces may not call them.
_OF_ALL_NAMESPACES = frozenset(
    {
        *("Coordinator/BeginSave", "Coordinator/EnterSave", "Coordinator/GetSave", "Coordinator/KeepRows"),
        "Coordinator/Restore",
        *("Changes/GetVersions", "Changes/OpenCursor", "Changes/ReadChanges", "Changes/CloseCursor", "Changes/GetRow"),
    }
)
_caller: ContextVar[TokenEntry | None] = ContextVar("caller", default=None)  # None: the server asks for no tokens


def check_call(security: Security, method: str, metadata: Any) -> None:
    """Refuses a call of the control plane that its token does not allow, before its message is read.

    Args:
        security: the security of the server.
        method: the full name, such as ``/sparserow.v1.Coordinator/GetCluster``.
        metadata: the metadata of the call.

    Raises:
        PermissionDenied: the token does not allow the call; the text says what is missing.
    """
    _caller.set(None)
    if security.tokens is None:
        return
    grant = security.grant_of(bearer_token(metadata))
    _caller.set(grant)
    name = method.removeprefix(_PREFIX)
    needed = _ROLES.get(name, "admin")
    if ROLES.index(grant.role) < ROLES.index(needed):
        raise PermissionDenied(f"token: its role {grant.role} does not allow {name}; {needed} does")
    if grant.namespaces is not None and name in _OF_ALL_NAMESPACES:
        raise PermissionDenied(f"token: {name} needs a token that reaches all namespaces")


def check_request(request: Any) -> None:
    """Refuses a message that names a namespace which the token of its call does not reach.

    It has to be called in the task in which :func:`check_call` was called.

    Raises:
        PermissionDenied: the token does not reach the namespace.
    """
    namespace = _namespace_of(request)
    if namespace is not None:
        check_caller(namespace)


def check_caller(namespace: str) -> None:
    """Refuses the call under way unless its token reaches a namespace, for requests that name a job by its number.

    It has to be called in the task in which :func:`check_call` was called.

    Raises:
        PermissionDenied: as for :func:`check_call`.
    """
    grant = _caller.get()
    if grant is not None:
        check_namespace(grant, namespace)


def caller_reaches(namespace: str) -> bool:
    """Whether the token of the call under way reaches a namespace, for methods that answer about several namespaces."""
    grant = _caller.get()
    return grant is None or reaches_namespace(grant, namespace)


def caller_namespaces() -> tuple[str, ...] | None:
    """Returns the namespaces that the token of the call under way reaches; None means all."""
    grant = _caller.get()
    return None if grant is None else grant.namespaces


def _namespace_of(request: Any) -> str | None:
    """Returns the namespace that a request names; None when it names none."""
    fields = request.DESCRIPTOR.fields_by_name
    if "namespace" in fields:
        return str(request.namespace)
    if "schema" in fields:
        return str(request.schema.namespace)
    return None


def check_certificate(security: Security) -> None:
    """Refuses a certificate that names no host, for servers to show.

    Raises:
        InvalidArgument: it does not, or is no certificate.
    """
    if not security.certificate:
        return
    from cryptography import x509  # a server without certificates does not load it

    try:
        extensions = x509.load_pem_x509_certificate(security.certificate.encode()).extensions
        names = list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    except ValueError as error:
        raise InvalidArgument(f"certificate: it cannot be read: {error}") from None
    if not names:
        raise InvalidArgument(
            "certificate: it names no host in subjectAltName; allowed: one with the names that clients dial"
        )


def server_credentials() -> grpc.ServerCredentials | None:
    """Returns the credentials of a gRPC server, which follow changes of the certificate; None without a certificate.

    Raises:
        InvalidArgument: the certificate names no host.
    """
    shown = process_security()
    if not shown.certificate:
        return None
    check_certificate(shown)
    last = [shown]

    def configuration(security: Security) -> Any:
        return grpc.ssl_server_certificate_configuration(
            [(security.key.encode(), security.certificate.encode())],
            root_certificates=security.client_authorities.encode() or None,
        )

    def fetch() -> Any:
        now = process_security()
        if now is last[0]:
            return None
        last[0] = now
        return configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        configuration(shown), fetch, require_client_authentication=bool(shown.client_authorities)
    )
