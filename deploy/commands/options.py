"""Options that several commands share, each with one help text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ...proto.config.config import ClusterConfig


def _follow_parent(parent_pid: int) -> int:
    if parent_pid:
        from ...proto.process.parent import die_with_parent

        die_with_parent(parent_pid)
    return parent_pid


def cluster_config(handed_down: str | None, flags: dict[str, Any]) -> ClusterConfig:
    """Returns the cluster section of a command: from its flags, or the one that a parent process passes on.

    Args:
        handed_down: the value of ``--cluster-json``, as :meth:`ClusterConfig.handed_down` wrote it; it replaces all
            flags.
        flags: values by key of ``ClusterConfig``.

    Raises:
        InvalidArgument: a value is not allowed; the text names the key.
    """
    import json

    from ...proto.config.config import ClusterConfig, validate
    from ...proto.errors import InvalidArgument

    if handed_down is None:
        return validate(ClusterConfig, flags)
    try:
        tree = json.loads(handed_down)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"--cluster-json: the value is not JSON: {error}") from None
    return validate(ClusterConfig, tree, where="--cluster-json")


def absolute_roots(roots: list[str] | None) -> list[str]:
    """Returns paths and URLs that mean the same to a process with another working folder."""
    from ...proto.checkpoint.urls import absolute

    return [absolute(root) for root in roots or ()]


DEFAULT_PORT = 7000
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_SERVING = "127.0.0.1:7100"

Host = Annotated[
    str, typer.Option(help="Address to listen on; an address that is not loopback needs TLS and tokens, or --insecure.")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        help="HOST or HOST:PORT that other processes use. Default: --host. When that is a wildcard: the address of the "
        "interface that reaches the coordinator, and this host's name for the coordinator."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen without TLS and tokens on an address that other machines can reach.")
]
CheckpointRoot = Annotated[
    list[str] | None,
    typer.Option(
        help="Path or URL below which checkpoints are saved and restored; may be repeated. Default: any place on "
        "loopback without tokens, otherwise none."
    ),
]
MemoryBudget = Annotated[
    str | None, typer.Option(help="Memory for the rows and indexes of a shard, such as 8GiB. Default: no budget.")
]
SsdPath = Annotated[
    str | None,
    typer.Option(help="Folder on an SSD for rows beyond --memory-budget; shard N uses shard-N in it. Default: none."),
]
SsdBytes = Annotated[
    str | None,
    typer.Option(help="Bytes of files of a shard in --ssd-path, such as 100GiB. Default: what the disk has."),
]
SsdEngine = Annotated[
    str | None,
    typer.Option(help="Storage of rows in --ssd-path: pages, with the least work, or rocksdb. Default: pages."),
]
SsdDirectIo = Annotated[
    bool,
    typer.Option(
        "--ssd-direct-io",
        help="Let the engine pages read and write --ssd-path past the system's cache. Default: through the cache.",
    ),
]
SweepEvery = Annotated[
    str,
    typer.Option(help="Time between sweeps that remove rows by their table's policy, such as 60s; never: by command."),
]
IoThreads = Annotated[int, typer.Option(help="Number of network threads of a shard.")]
MetricsPort = Annotated[
    int | None, typer.Option(help="Port of the Prometheus page, on the same host. Default: no page.")
]
HealthPort = Annotated[
    int | None,
    typer.Option(help="Port for gRPC health checks without TLS, as Kubernetes needs. Default: none."),
]
LogFormat = Annotated[str, typer.Option(help="Form of log lines on stderr: plain or json.")]
LogLevel = Annotated[str, typer.Option(help="Lowest severity that is logged: debug, info, warning or error.")]
ModelRoot = Annotated[str, typer.Option("--root", help="Path or URL of the folder of published models.")]
Serving = Annotated[str, typer.Option(help="HOST:PORT of the gRPC servers of serving processes, with commas.")]
Shards = Annotated[int, typer.Option(help="Number of parameter servers that make up the cluster.")]
SlotCount = Annotated[
    int, typer.Option(help="Number of slots that rows are spread over: a power of two, which never changes.")
]
Modulo = Annotated[
    int | None,
    typer.Option(min=1, help="Divisor when the row is at key % MODULO: the rows of the table in model.args.rows."),
]
WorkerLease = Annotated[
    str, typer.Option(help="Time without a heartbeat after which a worker leaves its job, such as 10s.")
]
ShardLease = Annotated[
    str, typer.Option(help="Time without a heartbeat after which a shard counts as lost, such as 10s.")
]

# A parent process passes the whole cluster section in this option.
ClusterJson = Annotated[str | None, typer.Option(hidden=True)]
DieWithParent = Annotated[int, typer.Option(hidden=True, callback=_follow_parent)]


def seconds_or_never(text: str) -> str | None:
    """Returns the value of an option that is a duration or ``never``, which becomes None."""
    return None if text == "never" else text
