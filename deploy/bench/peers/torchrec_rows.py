"""torchrec: an ``EmbeddingBagCollection`` that is sharded by rows over two processes, which talk by gloo.

Each process asks for half of the batch's keys, so that both together move as many rows as one client of another peer.
``pull`` is the forward, ``step`` is forward, backward and the fused Adagrad.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

if TYPE_CHECKING:
    from .worker import Tools

_WORLD = 2
_TIMEOUT_SEC = 120.0


def measure(asked: dict[str, Any], tools: Tools) -> None:
    """Runs the first process; the second makes the same calls."""
    tools.note_versions("torch", "torchrec", "fbgemm-gpu-cpu")
    store = TCPStore("127.0.0.1", 0, _WORLD, is_master=True, wait_for_workers=False)
    tools.start("second", port=store.port)
    _train(asked, tools, store, rank=0)


def second(asked: dict[str, Any], tools: Tools) -> None:
    """Runs the second process."""
    store = TCPStore("127.0.0.1", asked["port"], _WORLD, is_master=False)
    tools.ready("started")
    _train(asked, tools, store, rank=1)


def _train(asked: dict[str, Any], tools: Tools, store: Any, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=_WORLD, timeout=timedelta(seconds=_TIMEOUT_SEC)
    )
    half = asked["keys"] // _WORLD
    part = slice(rank * half, (rank + 1) * half)
    lengths = torch.ones(half, dtype=torch.int32)
    batches = tools.batches()

    def features() -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys=["key"], values=torch.from_numpy(next(batches)[part]), lengths=lengths)

    for dim in tools.dims():
        model = _sharded(asked["rows"], dim)
        factors = torch.from_numpy(tools.grads(dim)[part])

        def pull(keys: KeyedJaggedTensor, model: Any = model) -> None:
            with torch.no_grad():
                model(keys).values()

        def step(keys: KeyedJaggedTensor, model: Any = model, factors: torch.Tensor = factors) -> None:
            model(keys).values().backward(factors)

        def made() -> KeyedJaggedTensor:
            keys = features()
            distributed.barrier()
            return keys

        def together(run: Any) -> Any:
            def call(keys: KeyedJaggedTensor) -> None:
                run(keys)
                distributed.barrier()  # the slower process counts

            return call

        tools.time("pull", dim, made, together(pull))
        tools.time("step", dim, made, together(step))


def _sharded(rows: int, dim: int) -> Any:
    """Returns a collection of one table, whose rows are divided among the processes."""
    config = EmbeddingBagConfig(name="table", feature_names=["key"], num_embeddings=rows, embedding_dim=dim)
    bags = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.01, "eps": 1e-10})
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        bags, {"table": row_wise()}, sharder=sharder, local_size=_WORLD, world_size=_WORLD, device_type="cpu"
    )
    group = distributed.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        module=bags,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"": plan}),
        sharders=[sharder],
    )
