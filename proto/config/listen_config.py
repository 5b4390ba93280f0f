"""Where the servers of a process listen, and what they advertise."""

from __future__ import annotations

from pydantic import Field

from ..options.strict_model import StrictModel


class ListenConfig(StrictModel):
    """The address of the servers of a process."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on; an address that is not loopback needs TLS and tokens, or --insecure.",
    )
    advertise: str | None = Field(
        None,
        description="HOST or HOST:PORT that other processes use. null: --host. When that is a wildcard: the address of "
        "the interface that reaches the coordinator, and this host's name for the coordinator.",
    )
    insecure: bool = Field(
        False, description="Listen without TLS and tokens on an address that other machines can reach."
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of the Prometheus page, on the same host; null: no page."
    )
    health_port: int | None = Field(
        None, ge=0, le=65535, description="Port for gRPC health checks without TLS, as Kubernetes needs; null: none."
    )
