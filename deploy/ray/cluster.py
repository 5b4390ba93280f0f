"""A Sparserow cluster as Ray actors: a coordinator on Ray's head node, shards and serving processes spread over nodes.

Ray restarts an actor whose node is gone on another one; its server then comes back at another address, a shard with the
rows of the newest checkpoint (docs/ray.md). All of it ends with the program that started it.
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

from ...proto.config.config import ClusterConfig, LogConfig
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
    """Serving processes of a cluster; they follow its training live.

    Args:
        model: ``NAME[@ALIAS|@VERSION]``.
        root: folder of published models, which every node reaches; None: rows come from training alone.
        namespace: of the tables, without a root.
        processes: how many; each has all slots.
        cpus: that Ray reserves for each.
    """

    model: str
    root: str | None = None
    namespace: str | None = None
    processes: int = 1
    cpus: float = 1.0

    def __post_init__(self) -> None:
        if (self.root is None) == (self.namespace is None):
            raise InvalidArgument("ServingOptions: give root, or namespace where rows come from training alone")
        if self.processes < 1 or self.cpus < 0:
            raise InvalidArgument(
                f"ServingOptions: processes {self.processes}, cpus {self.cpus}; allowed: processes >= 1, cpus >= 0"
            )


@dataclass(frozen=True)
class RayOptions:
    """How a cluster runs on Ray.

    Args:
        cluster: shards, budget, SSD, slots, leases; its ``address`` is None. A budget is reserved as Ray's ``memory``.
        log: of all servers.
        cpus_per_shard: that Ray reserves for each shard.
        strategy: of the shards' placement group.
        serving: None: no serving processes.
        insecure: servers listen on their node's address without certificates and tokens.
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
            raise InvalidArgument(f"RayOptions.cpus_per_shard: {self.cpus_per_shard} is not allowed; allowed: >= 0")
        if self.log.level not in ("debug", "info"):
            raise not_allowed(
                "RayOptions.log.level", self.log.level, "debug, info: a shard says in its log where it serves"
            )


class RayCluster:
    """A running cluster. Made by :func:`start_on_ray`; :meth:`stop` ends it.

    Attributes:
        address: ``HOST:PORT`` of the coordinator, for ``connect``.
        serving: ``HOST:PORT`` of gRPC of the serving processes that served when they were last asked for.
    """

    def __init__(self, actors: dict[str, Any], groups: list[Any], address: str) -> None:
        self._actors, self._groups, self.address = actors, groups, address

    def states(self) -> list[ServerState]:
        """Of every server; one that cannot be asked now, since Ray is starting its actor again, has no pid."""
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
            DeadlineExceeded: not in time; says which do not, and their last words.
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
        """Ends all servers in good order, and gives their places back."""
        import ray

        with contextlib.suppress(Exception):  # a node may be gone with its actor
            ray.wait([actor.stop.remote() for actor in self._actors.values()], num_returns=len(self._actors),
                     timeout=_STOP_SEC)  # fmt: skip
        for actor in self._actors.values():
            ray.kill(actor)
        for group in self._groups:
            ray.util.remove_placement_group(group)


def start_on_ray(options: RayOptions, *, deadline_sec: float = 120.0) -> RayCluster:
    """Starts a cluster on the Ray cluster that this process is connected to (``ray.init``).

    Raises:
        FailedPrecondition: Ray is not installed, or this process is not connected.
        DeadlineExceeded: Ray has no room for it, or a server does not start, in time (says which).
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
    """:func:`start_on_ray` for the duration of a block."""
    running = start_on_ray(options, deadline_sec=deadline_sec)
    try:
        yield running
    finally:
        running.stop()


def require_ray() -> Any:
    """The module, imported when it is first needed.

    Raises:
        FailedPrecondition: it is not installed.
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
            told = "; ".join(f"{state.name}: {state.last_words or 'not started yet'}" for state in missing)
            raise DeadlineExceeded(f"the cluster on Ray was not ready in time: {told}")
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
