"""The peers: what each runs, which versions it needs, and what is not comparable. This is the one place with versions.

A package that is named has its exact version. pip chooses the versions of packages that those require.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PinnedEnvironment:
    """Packages that peers need.

    Attributes:
        name: the name of its folder.
        pythons: the versions of Python for which its wheels exist, the preferred one first.
        installs: the arguments of each ``pip install``, in their order.
    """

    name: str
    pythons: tuple[str, ...]
    installs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Peer:
    """A system that does the work of this project's benchmarks.

    Attributes:
        name: its name for ``--only``.
        title: its name in tables; its versions stand beside it.
        worker: the module of this folder that measures it; None: ``deploy/bench/torch_rpc.py`` does.
        environment: the packages that it needs; None: those of this project.
        program: the program that it needs; "": none.
        works: what it is measured at: kinds of ``deploy/bench/peer_contests.py``.
        rows: what holds its rows.
        goals: the least ratio of this project's rate to the peer's, by work; works without one are for information.
        beside: what is not comparable, by work; "": of all of its works.
        origin: where the peer comes from.
        transport: the transport of ``torch.distributed.rpc``; "": another peer.
    """

    name: str
    title: str
    worker: str | None
    environment: PinnedEnvironment | None
    program: str
    works: tuple[str, ...]
    rows: str
    goals: dict[str, float]
    beside: dict[str, str]
    origin: str
    transport: str = ""


TORCHREC = PinnedEnvironment(
    "torchrec",
    ("3.11", "3.12", "3.10"),
    (
        (
            "torch==2.13.0",
            "fbgemm-gpu-cpu==1.8.0",
            "numpy==2.2.6",
            "torchmetrics==1.0.3",
            "tensordict==0.8.3",
            "iopath==0.1.10",
            "tqdm==4.67.1",
            "pyre-extensions==0.0.32",
        ),
        ("--no-deps", "torchrec==1.8.0"),  # it requires the fbgemm-gpu for CUDA
    ),
)
TENSORFLOW = PinnedEnvironment(
    "tensorflow",
    ("3.11", "3.10"),
    (("tensorflow==2.16.2", "tf-keras==2.16.0", "tensorflow-recommenders-addons==0.8.1", "numpy==1.26.4"),),
)
PADDLE = PinnedEnvironment(
    "paddle", ("3.10",), (("paddlepaddle==2.6.2", "protobuf==3.20.3", "numpy==1.26.4", "setuptools==75.8.0"),)
)
ENVIRONMENTS = (TORCHREC, TENSORFLOW, PADDLE)

_PLAIN = "a plain matrix, by index"
_NO_GROWTH = "It searches no key and creates no row, and nothing makes a push count exactly once."
_NO_SEARCH = "It searches no key and creates no row."
PEERS = (
    Peer(
        "torch_rpc_memory",
        "torch.distributed.rpc, shared memory",
        worker=None,
        transport="shared memory",
        environment=None,
        program="",
        works=("pull", "push"),
        rows=_PLAIN,
        goals={"pull": 0.9, "push": 0.9},
        beside={"": f"{_NO_GROWTH} Rows move through shared memory and not through TCP."},
        origin="torch, as this project has it",
    ),
    Peer(
        "torch_rpc_tcp",
        "torch.distributed.rpc, TCP",
        worker=None,
        transport="TCP",
        environment=None,
        program="",
        works=("pull", "push"),
        rows=_PLAIN,
        goals={"pull": 1.0, "push": 1.0},
        beside={"": _NO_GROWTH},
        origin="torch, as this project has it",
    ),
    Peer(
        "torchrec",
        "torchrec, row-wise",
        worker="torchrec_rows",
        environment=TORCHREC,
        program="",
        works=("pull", "step"),
        rows="plain shards, by index",
        goals={"pull": 1.0, "step": 1.0},
        beside={
            "": "Two processes (gloo) hold the rows and take half a batch each; half of the rows stay in a process.",
            "pull": "The pull is the forward of an EmbeddingBagCollection.",
            "step": "Adagrad is fused into backward.",
        },
        origin="the Python package index",
    ),
    Peer(
        "redis",
        "Redis",
        worker="redis_strings",
        environment=None,
        program="redis-server",
        works=("pull", "push", "lookup"),
        rows="a hash of strings",
        goals={"pull": 1.0, "push": 1.0, "lookup": 1.0},
        beside={
            "pull": "Pipelined MGET of 1,000 keys; replies are copied into an array without a parser.",
            "push": "Pipelined MSET of 1,000 keys replaces rows: there is no optimizer.",
            "lookup": "One MGET with its encoding; the reply is copied into an array without a parser.",
        },
        origin="Debian's package redis-server",
    ),
    Peer(
        "tensorflow",
        "TensorFlow parameter server, gRPC",
        worker="tensorflow_servers",
        environment=TENSORFLOW,
        program="",
        works=("pull", "push", "step"),
        rows=_PLAIN,
        goals={"pull": 1.0, "push": 1.0, "step": 1.0},
        beside={"": _NO_GROWTH},
        origin="the Python package index",
    ),
    Peer(
        "tfra",
        "TFRA (TensorFlow Recommenders Addons)",
        worker="tfra_tables",
        environment=TENSORFLOW,
        program="",
        works=("pull", "push", "read", "update", "step"),
        rows="a cuckoo hash",
        goals={"pull": 1.0, "push": 1.0, "read": 1.0, "update": 1.0, "step": 1.0},
        beside={
            "pull": "On a TensorFlow parameter server, gRPC.",
            "push": "On a TensorFlow parameter server, gRPC. An upsert replaces rows: there is no optimizer.",
            "update": "An upsert replaces rows: there is no optimizer.",
            "step": "One process with one thread has the tables; this project's are in a shard process.",
        },
        origin="the Python package index",
    ),
    Peer(
        "fbgemm",
        "fbgemm TBE",
        worker="fbgemm_rows",
        environment=TORCHREC,
        program="",
        works=("read", "update"),
        rows=_PLAIN,
        goals={},
        beside={"": _NO_SEARCH, "update": "The update has the forward and the backward in it."},
        origin="the Python package index",
    ),
    Peer(
        "torch_bags",
        "torch EmbeddingBag",
        worker="torch_bags",
        environment=None,
        program="",
        works=("read", "update", "step"),
        rows=_PLAIN,
        goals={"update": 1.0, "step": 1.0},
        beside={
            "": _NO_SEARCH,
            "update": "torch.optim.Adagrad with sparse gradients.",
            "step": "One process with one thread has the matrix; this project's rows are in a shard process.",
        },
        origin="torch, as this project has it",
    ),
    Peer(
        "paddle",
        "Paddle parameter server, brpc",
        worker="paddle_servers",
        environment=PADDLE,
        program="",
        works=("pull", "step"),
        rows="a hash",
        goals={"pull": 1.0, "step": 1.0},
        beside={
            "pull": "The pull is the part of a static program that reads rows.",
            "step": "Pushes are asynchronous, several in a message. Rows are seen to change, their values are not.",
        },
        origin="the Python package index",
    ),
)
