"""Options that several commands have, with one help text each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ...proto.config.config import ClusterConfig


def _follow_parent(parent_pid: int) -> int:
    if parent_pid:
        from ...ps_server.process.parent import die_with_parent

        die_with_parent(parent_pid)
    return parent_pid


def cluster_config(handed_down: str | None, flags: dict[str, Any]) -> ClusterConfig:
    """The cluster of a command: that of its flags, or the validated one that a parent process hands down.

    Args:
        handed_down: ``--cluster-json``, as :meth:`ClusterConfig.handed_down` wrote it; it stands in place of all flags.
        flags: values by key of ``ClusterConfig``.

    Raises:
        InvalidArgument: a value is not allowed (names the key).
    """
    import json

    from ...proto.config.config import ClusterConfig, validate
    from ...proto.errors import InvalidArgument

    if handed_down is None:
        return validate(ClusterConfig, flags)
    try:
        tree = json.loads(handed_down)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"--cluster-json: is no JSON: {error}") from None
    return validate(ClusterConfig, tree, where="--cluster-json")


def absolute_roots(roots: list[str] | None) -> list[str]:
    """Paths and URLs that mean the same to a process with another working folder."""
    from ...proto.checkpoint.urls import absolute

    return [absolute(root) for root in roots or ()]


DEFAULT_PORT = 7000
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_SERVING = "127.0.0.1:7100"

Host = Annotated[
    str, typer.Option(help="Address to listen on; one that is not loopback needs TLS and tokens, or --insecure.")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        help="HOST or HOST:PORT that others are told. Default: --host; where that is every address, that of the "
        "interface which reaches the coordinator, and this host's name for the coordinator."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen on an address that others can reach without TLS and tokens.")
]
CheckpointRoot = Annotated[
    list[str] | None,
    typer.Option(
        help="Path or URL below which checkpoints are saved and restored; may be given several times. Default: any on "
        "loopback without tokens, else none."
    ),
]
MemoryBudget = Annotated[
    str | None, typer.Option(help="Rows and indexes that a shard may hold, such as 8GiB. Default: no budget.")
]
SsdPath = Annotated[
    str | None,
    typer.Option(help="Folder on an SSD for rows beyond --memory-budget, shard-N in it for each shard. Default: none."),
]
SsdBytes = Annotated[
    str | None, typer.Option(help="Files that a shard may keep there, such as 100GiB. Default: what the disk has.")
]
SweepEvery = Annotated[
    str, typer.Option(help="Between sweeps that remove rows by their table's policy, such as 60s; never: by command.")
]
IoThreads = Annotated[int, typer.Option(help="Network threads of a shard.")]
MetricsPort = Annotated[
    int | None, typer.Option(help="Port of the Prometheus page, on the same host. Default: none is served.")
]
HealthPort = Annotated[
    int | None,
    typer.Option(help="Port of gRPC health alone, without TLS, for probes of Kubernetes. Default: none is served."),
]
LogFormat = Annotated[str, typer.Option(help="plain or json: how log lines are written to stderr.")]
LogLevel = Annotated[str, typer.Option(help="Least severity that is logged: debug, info, warning or error.")]
ModelRoot = Annotated[str, typer.Option("--root", help="Path or URL of the folder of published models.")]
Serving = Annotated[str, typer.Option(help="HOST:PORT of gRPC of serving processes, with commas.")]
Shards = Annotated[int, typer.Option(help="Number of parameter servers that make up the cluster.")]
SlotCount = Annotated[int, typer.Option(help="Slots that rows are spread over: a power of two, fixed for ever.")]
Modulo = Annotated[
    int | None,
    typer.Option(min=1, help="The row is at key % MODULO: model.rows (or table_rows) of a job file's model."),
]
WorkerLease = Annotated[str, typer.Option(help="Silence after which a worker leaves its job, such as 10s.")]
ShardLease = Annotated[str, typer.Option(help="Silence after which a shard counts as lost, such as 10s.")]

# What a parent process writes: all of the cluster's configuration at once.
ClusterJson = Annotated[str | None, typer.Option(hidden=True)]
DieWithParent = Annotated[int, typer.Option(hidden=True, callback=_follow_parent)]


def seconds_or_never(text: str) -> str | None:
    """The value of an option that is a duration or ``never``."""
    return None if text == "never" else text
