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
        works: what it is measured at, see ``deploy/bench/peer_works.py``.
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
