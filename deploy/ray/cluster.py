"""A Sparserow cluster as Ray actors: a coordinator on Ray's head node, and shards and serving processes on any node.

When a node is gone, Ray restarts its actors on another one. Their servers then come back at other addresses, and a
shard with the rows of the newest checkpoint (docs/ray.md). The cluster ends with the program that started it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.log_config import LogConfig
from ...proto.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, not_allowed
from ...proto.extras import install_command
from ...proto.security.security import process_security
from ..launch.readiness import wait_until_ready
from ..launch.security_files import security_arguments
from .supervisor import ServerCommand, ServerState, Supervisor

Strategy = Literal["SPREAD", "STRICT_SPREAD", "PACK"]
_POLL_SEC = 0.2
_ASK_SEC = 10.0
_STOP_SEC = 30.0


@dataclass(frozen=True)
class ServingOptions:
    """The options of a cluster's serving processes, which follow its training live.

    Args:
        model: ``NAME[@ALIAS|@VERSION]``.
        root: the folder of published models, which every node reaches; None serves the rows of training.
        namespace: the namespace of the tables, when there is no root.
        processes: the number of processes; each has all slots.
        cpus: the CPUs that Ray reserves for each process.

    Raises:
        InvalidArgument: a value is not allowed.
    """

    model: str
    root: str | None = None
    namespace: str | None = None
    processes: int = 1
    cpus: float = 1.0

    def __post_init__(self) -> None:
        if (self.root is None) == (self.namespace is None):
            raise InvalidArgument("ServingOptions: give either root, or namespace to serve the rows of training")
        if self.processes < 1 or self.cpus < 0:
            raise InvalidArgument(
                f"ServingOptions: processes {self.processes}, cpus {self.cpus}; allowed: processes >= 1, cpus >= 0"
            )


@dataclass(frozen=True)
class RayOptions:
    """The options of a cluster on Ray.

    Args:
        cluster: shards, budget, SSD, slots and leases; its ``address`` is None. The budget is reserved as Ray's
            ``memory``.
        log: the log options of all servers.
        cpus_per_shard: the CPUs that Ray reserves for each shard.
        strategy: the strategy of the shards' placement group.
        serving: the options of serving processes; None starts none.
        insecure: whether servers listen on their node's address without certificates and tokens.

    Raises:
        InvalidArgument: a value is not allowed.
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cpus_per_shard: float = 1.0
    strategy: Strategy = "SPREAD"
    serving: ServingOptions | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in ("SPREAD", "STRICT_SPREAD", "PACK"):
            raise not_allowed("RayOptions.strategy", self.strategy, "SPREAD, STRICT_SPREAD, PACK")
        if self.cpus_per_shard < 0:
            raise not_allowed("RayOptions.cpus_per_shard", self.cpus_per_shard, ">= 0")
        if self.log.level not in ("debug", "info"):
            raise not_allowed(
                "RayOptions.log.level", self.log.level, "debug, info: the log of a shard has to show where it serves"
            )


class RayCluster:
    """A running cluster, made by :func:`start_on_ray`; :meth:`stop` ends it.

    Attributes:
        address: ``HOST:PORT`` of the coordinator, for ``connect``.
        serving: ``HOST:PORT`` of the gRPC servers of the serving processes that serve now.
    """

    def __init__(self, actors: dict[str, Any], groups: list[Any], address: str) -> None:
        self._actors, self._groups, self.address = actors, groups, address

    def states(self) -> list[ServerState]:
        """Returns the state of every server; a server whose actor Ray is restarting has no pid."""
        import ray

        asked = {name: actor.state.remote() for name, actor in self._actors.items()}
        states = []
        for name, answer in asked.items():
            try:
                states.append(ServerState(**ray.get(answer, timeout=_ASK_SEC)))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                states.append(ServerState(name, "", 0, 0, " ".join(str(error).split())[:200], ""))
        return states

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(state.address for state in self.states() if state.name.startswith("serving") and state.address)

    def wait_ready(self, deadline_sec: float) -> None:
        """Returns when the coordinator and every shard serve.

        Raises:
            DeadlineExceeded: the cluster was not ready in time; the text names the missing servers and their last
                lines.
        """
        import ray

        deadline = time.monotonic() + deadline_sec
        _wait(self, [name for name in self._actors if not name.startswith("serving")], deadline_sec)
        security = process_security().path
        path = None if security is None else str(security.resolve())
        left = max(1.0, deadline - time.monotonic())
        try:
            ray.get(ray.remote(num_cpus=0)(wait_until_ready).remote(self.address, left, path))
        except ray.exceptions.RayTaskError as error:
            raise DeadlineExceeded(str(error).strip().splitlines()[-1]) from error

    def stop(self) -> None:
        """Ends all servers in order, and releases their places in Ray."""
        import ray

        with contextlib.suppress(Exception):  # an actor may be gone with its node
            ray.wait([actor.stop.remote() for actor in self._actors.values()], num_returns=len(self._actors),
                     timeout=_STOP_SEC)  # fmt: skip
        for actor in self._actors.values():
            ray.kill(actor)
        for group in self._groups:
            ray.util.remove_placement_group(group)


def start_on_ray(options: RayOptions, *, deadline_sec: float = 120.0) -> RayCluster:
    """Starts a cluster on the Ray cluster that this process is connected to (``ray.init``).

    Args:
        options: the options of the cluster.
        deadline_sec: the time in which the cluster must be ready, in seconds.

    Raises:
        FailedPrecondition: Ray is not installed, or this process is not connected.
        DeadlineExceeded: Ray has no room for the cluster, or a server does not start in time; the text says which.
    """
    ray = require_ray()
    if not ray.is_initialized():
        raise FailedPrecondition("start_on_ray: this process is not connected to Ray; call ray.init(address=...) first")
    deadline = time.monotonic() + deadline_sec
    cluster, folder = options.cluster, str(Path(tempfile.gettempdir()) / f"sparserow-ray-{uuid.uuid4().hex[:12]}")
    memory = {} if cluster.memory_budget is None else {"memory": float(cluster.memory_budget)}
    place = {"CPU": options.cpus_per_shard, **memory}
    running = RayCluster({}, [], "")
    try:
        head = {"resources": {"node:__internal_head__": 0.001}, "num_cpus": 0}
        running._actors["coordinator"] = _actor(_coordinator(options, folder), head)
        _wait(running, ["coordinator"], deadline - time.monotonic())
        running.address = running.states()[0].address
        shards = [_shard(options, index, running.address) for index in range(cluster.shards)]
        _place(running, shards, place, options.strategy, deadline)
        running.wait_ready(deadline - time.monotonic())
        if options.serving is not None:
            served = [_serving(options, options.serving, index, running.address)
                      for index in range(options.serving.processes)]  # fmt: skip
            _place(running, served, {"CPU": options.serving.cpus}, "SPREAD", deadline)
    except BaseException:
        running.stop()
        raise
    return running


@contextlib.contextmanager
def ray_cluster(options: RayOptions, *, deadline_sec: float = 120.0) -> Iterator[RayCluster]:
    """Runs :func:`start_on_ray` for the duration of a block."""
    running = start_on_ray(options, deadline_sec=deadline_sec)
    try:
        yield running
    finally:
        running.stop()


def require_ray() -> Any:
    """Returns the module ``ray``, which is imported when it is first needed.

    Raises:
        FailedPrecondition: Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise FailedPrecondition(f"Ray is not installed; install it with: {install_command('ray')}") from None
    return ray


def _actor(command: ServerCommand, options: dict[str, Any]) -> Any:
    import ray

    return ray.remote(Supervisor).options(max_restarts=-1, **options).remote(asdict(command))


def _place(
    running: RayCluster, commands: list[ServerCommand], place: dict[str, float], strategy: str, deadline: float
) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = {name: amount for name, amount in place.items() if amount} or {"CPU": 0.001}
    group = ray.util.placement_group([wanted] * len(commands), strategy=strategy)
    running._groups.append(group)
    if not group.wait(max(0.1, deadline - time.monotonic())):
        raise DeadlineExceeded(
            f"Ray has no room for {len(commands)} times {wanted} ({strategy}); it has {ray.available_resources()}"
        )
    for index, command in enumerate(commands):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": wanted.get("CPU", 0), "scheduling_strategy": where}
        if "memory" in wanted:
            options["memory"] = wanted["memory"]
        running._actors[command.name] = _actor(command, options)


def _wait(running: RayCluster, names: list[str], deadline_sec: float) -> None:
    deadline = time.monotonic() + deadline_sec
    while True:
        missing = [state for state in running.states() if state.name in names and not state.address]
        if not missing:
            return
        if time.monotonic() > deadline:
            reasons = "; ".join(f"{state.name}: {state.last_words or 'not started yet'}" for state in missing)
            raise DeadlineExceeded(f"the cluster on Ray was not ready in time: {reasons}")
        time.sleep(_POLL_SEC)


def _common(options: RayOptions) -> tuple[str, ...]:
    log = (f"--log-format={options.log.format}", f"--log-level={options.log.level}")
    return ("--host={host}", *log, *(("--insecure",) if options.insecure else ()))


def _coordinator(options: RayOptions, folder: str) -> ServerCommand:
    arguments = (
        *(*security_arguments(), "coordinator", *_common(options)),
        f"--shards={options.cluster.shards}",
        f"--cluster-json={options.cluster.handed_down()}",
        "--state={folder}/state.json",
    )
    return ServerCommand("coordinator", arguments, r"coordinator at (?P<address>\S+:\d+)", "--port", folder)


def _shard(options: RayOptions, index: int, coordinator: str) -> ServerCommand:
    arguments = (
        *(*security_arguments(), "ps", *_common(options)),
        f"--coordinator={coordinator}",
        f"--shard={index}",
        f"--cluster-json={options.cluster.handed_down()}",
    )
    return ServerCommand(f"shard {index}", arguments, r"rows are served at (?P<address>\S+:\d+)", "--port")


def _serving(options: RayOptions, serving: ServingOptions, index: int, coordinator: str) -> ServerCommand:
    source = f"--namespace={serving.namespace}" if serving.root is None else f"--root={serving.root}"
    arguments = (
        *(*security_arguments(), "serve", *_common(options)),
        f"--model={serving.model}",
        *(source, f"--follow={coordinator}", f"--replica={index}"),
    )
    return ServerCommand(f"serving {index}", arguments, r"ready at gRPC (?P<address>\S+:\d+), data", "--port")
