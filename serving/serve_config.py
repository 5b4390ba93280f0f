"""The options of a serving process: the fields of ``sparserow serve``, each said once."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from ..proto.config.listen_config import ListenConfig
from ..proto.coordinators import parse_address
from ..proto.errors import InvalidArgument
from ..proto.options.path_text import PathText
from ..proto.options.strict_model import Bytes, FromList, Seconds

_POLL_SEC, _POLL_FAR_SEC = 0.5, 5.0  # of folders, and of URLs, where each look costs requests
_LONGEST_SEC = 5.0


def _addresses(value: object) -> object:
    parts = [value] if isinstance(value, str) else value
    return tuple(name for part in parts for name in str(part).split(",")) if isinstance(parts, list | tuple) else value


Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]


class ServeConfig(ListenConfig):
    """The options of a serving process.

    Raises:
        InvalidArgument: an option is missing, or has no effect beside the others; the text names it.
    """

    model: Annotated[tuple[str, ...], FromList] = Field(
        min_length=1,
        description="NAME[@ALIAS|@VERSION]; may be repeated. NAME alone means NAME@live.",
        json_schema_extra={"allowed": "NAME[@ALIAS|@VERSION]"},
    )
    root: PathText | None = Field(
        None, description="Path or URL of the folder of published models; null: the rows of --follow are served."
    )
    shard: str = Field("0/1", description="I/N: this process serves part I of N parts of the slots.")
    replica: int = Field(0, ge=0, description="Index of this process among those that serve the same shard.")
    peers: Annotated[tuple[str, ...] | None, BeforeValidator(_addresses)] = Field(
        None,
        description="HOST:PORT of the gRPC servers of the processes of all shards, with commas: gRPC and HTTP ask them "
        "for keys of other shards; null: such keys are not answered.",
    )
    follow: str | None = Field(None, description="HOST:PORT of the training cluster's coordinator; null: no live sync.")
    namespace: str | None = Field(None, description="Without --root: the namespace whose tables are served.")
    port: Port = Field(7100, description="Port of gRPC; 0: any free one.")
    data_port: Port = Field(0, description="Port of the data plane; 0: any free one.")
    http_port: Port | None = Field(None, description="Port of HTTP/JSON; 0: any free one. null: no HTTP.")
    memory_budget: Bytes | None = Field(
        None, description="Memory for the rows of each version, such as 8GiB; null: no budget."
    )
    ssd_path: PathText | None = Field(
        None,
        description="Folder on an SSD for rows beyond memory_budget; null: a version that does not fit fails.",
    )
    ssd_engine: Literal["pages", "rocksdb"] | None = Field(
        None, description="Storage of rows in ssd_path: pages, with the least work, or rocksdb; null: pages."
    )
    ssd_direct_io: bool = Field(
        False, description="Whether the engine pages reads and writes ssd_path past the system's cache."
    )
    io_threads: int = Field(2, ge=1, le=256, description="Number of network threads of the data plane.")
    sync_interval: Seconds = Field(
        0.1,
        ge=0.001,
        le=3600,
        description="Shortest time between rounds of live sync, such as 100ms; changes of a row within it are sent "
        "once. Rounds that take long begin up to 1s after each other.",
    )
    sync_after_updates: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="Number of writes since a row was last sent after which live sync sends it. 0: at once.",
    )
    sync_after_move: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="L2 distance from the row as last sent beyond which live sync sends it. 0: at once.",
    )
    sync_max_delay: Seconds | None = Field(
        None,
        ge=0.001,
        le=3600,
        description="With either of these: the longest wait of a changed row; null: 5s.",
    )
    poll: Seconds | None = Field(
        None, gt=0, description="Time between checks of the aliases; null: 500ms for a folder, 5s for a URL."
    )
    grace: Seconds = Field(
        30.0, ge=0, description="How long a version is still served after its alias has moved, such as 30s."
    )

    @property
    def poll_sec(self) -> float:
        """The pause between two checks of the aliases, in seconds."""
        is_far = self.root is not None and "://" in self.root and not self.root.startswith("file://")
        return self.poll if self.poll is not None else _POLL_FAR_SEC if is_far else _POLL_SEC

    @property
    def longest_sec(self) -> float:
        """The longest wait of a changed row below the thresholds of live sync, in seconds."""
        return self.sync_max_delay if self.sync_max_delay is not None else _LONGEST_SEC

    @model_validator(mode="after")
    def _has_an_effect(self) -> ServeConfig:
        is_held = bool(self.sync_after_updates or self.sync_after_move)
        if self.sync_max_delay is not None and not is_held:
            raise InvalidArgument("sync_max_delay has no effect without sync_after_updates or sync_after_move")
        if is_held and self.follow is None:
            raise InvalidArgument("sync_after_updates and sync_after_move have no effect without --follow")
        if "sync_interval" in self.model_fields_set and self.follow is None:
            raise InvalidArgument("sync_interval has no effect without --follow")
        if self.root is None and (self.follow is None or self.namespace is None):
            raise InvalidArgument("root: is missing; name the folder of published models, or --follow and --namespace")
        if self.root is not None and self.namespace is not None:
            raise InvalidArgument("namespace has no effect with --root; remove one of them")
        if self.peers is not None and self.shard.endswith("/1"):
            raise InvalidArgument("peers has no effect with one shard; remove it, or name --shard I/N")
        for peer in self.peers or ():
            parse_address(peer, what="--peers")
        return self
