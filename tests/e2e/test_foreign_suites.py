"""Every model of DeepCTR-Torch, and torchrec's un-sharded modules: trained on servers they have the losses of torch.

A model is copied, one copy is distributed with its weights, and both take the same steps. What is refused is named with
its reason.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.worker.api.in_process import InProcessCluster

SAMPLES, STEPS, LR = 64, 3, 0.1
SPARSE_ALONE = ("AFM", "CCPM")  # which refuse dense columns themselves
WITH_HISTORY = ("DIN", "DIEN")


def losses_of_both(local: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[tuple[float, float]]:
    """(loss of torch, loss on servers) of each step; the rows are alike at the end, and have moved."""
    embeddings = {
        path: each for path, each in local.named_modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    }
    for each in embeddings.values():
        nn.init.normal_(each.weight, std=0.5)  # DeepCTR's own 0.0001 hides most of a loss
    before = {path: each.weight.detach().clone() for path, each in embeddings.items()}
    with InProcessCluster(slot_count=16).connect() as session, warnings.catch_warnings():
        # DeepCTR lists the weights of tables for L2; the warning names the remedy.
        warnings.filterwarnings("ignore", "distribute: the weights of", UserWarning)
        model = session.distribute(copy.deepcopy(local), optimizer=sr.optim.Adagrad(lr=LR), min_rows=1)
        assert session.core.bound_tables()
        own = torch.optim.Adagrad(local.parameters(), lr=LR)
        left = [parameter for parameter in model.parameters() if parameter.numel()]
        dense = torch.optim.Adagrad(left, lr=LR) if left else None
        found = []
        for _ in range(STEPS):
            one = loss(local)
            own.zero_grad()
            one.backward()
            own.step()
            two = loss(model)
            if dense is not None:
                dense.zero_grad()
            two.backward()
            session.step(dense)
            found.append((float(one.detach()), float(two.detach())))
        for path, each in embeddings.items():
            rows = torch.from_numpy(session.table(path).pull(np.arange(len(each.weight))))
            torch.testing.assert_close(rows, each.weight.detach(), rtol=1e-3, atol=1e-4)
        # MLR and ONN make tables that their forward does not read.
        assert any(not torch.equal(before[path], each.weight) for path, each in embeddings.items())
        return found


def assert_alike(found: list[tuple[float, float]]) -> None:
    for one, two in found:
        assert two == pytest.approx(one, rel=2e-4, abs=1e-6)


# ---- DeepCTR-Torch


def deepctr_names() -> list[str]:
    try:
        models = importlib.import_module("deepctr_torch.models")
    except (ImportError, OSError):
        return []
    return sorted(name for name, each in vars(models).items() if inspect.isclass(each) and name != "BaseModel")


def columns_of(name: str) -> list[Any]:
    inputs = importlib.import_module("deepctr_torch.inputs")
    if name in WITH_HISTORY:
        item = inputs.SparseFeat("hist_item", 20, embedding_dim=4, embedding_name="item")
        history = inputs.VarLenSparseFeat(item, maxlen=5, length_name="seq_length")
        return [*(inputs.SparseFeat(each, 20, embedding_dim=4) for each in ("user", "item")), history]
    sparse = [inputs.SparseFeat(each, 20, embedding_dim=4) for each in ("user", "item", "cat")]
    tags = inputs.VarLenSparseFeat(inputs.SparseFeat("tags", 15, embedding_dim=4), maxlen=5, combiner="mean")
    return [*sparse, *([] if name in SPARSE_ALONE else [inputs.DenseFeat("price", 1)]), tags]


def cells_of(model: Any) -> Tensor:
    """Random ids in each column of the matrix that DeepCTR's models take; lists end in zeros."""
    draw, parts = np.random.default_rng(1), []
    lengths = draw.integers(1, 6, SAMPLES)
    for name, (begin, end) in model.feature_index.items():
        part = draw.integers(1, 15, (SAMPLES, end - begin))
        if end - begin > 1:
            part[np.arange(end - begin)[None] >= lengths[:, None]] = 0
        parts.append(lengths[:, None] if name == "seq_length" else part)
    return torch.tensor(np.concatenate(parts, axis=1), dtype=torch.float32)


@pytest.mark.parametrize("name", deepctr_names() or [pytest.param("", marks=pytest.mark.skip("no deepctr_torch"))])
def test_a_model_of_deepctr_has_the_losses_of_torch(name: str) -> None:
    made, columns = getattr(importlib.import_module("deepctr_torch.models"), name), columns_of(name)
    takes = inspect.signature(made.__init__).parameters
    given = {
        "linear_feature_columns": columns,
        "dnn_feature_columns": columns,
        "region_feature_columns": columns,
        "history_feature_list": ["item"],
        "task_types": ["binary", "binary"],
        "task_names": ["click", "sale"],
    }
    torch.manual_seed(1)
    local = made(**{key: value for key, value in given.items() if key in takes}, device="cpu")
    cells, tasks = cells_of(local), 2 if "task_names" in takes else 1
    labels = torch.randint(0, 2, (SAMPLES, tasks), generator=torch.Generator().manual_seed(2)).float()
    assert_alike(
        losses_of_both(
            local.train(),
            lambda model: nn.functional.binary_cross_entropy(model(cells).reshape(labels.shape), labels),
        )
    )


# ---- torchrec

FEATURES = ("f1", "f2", "f3")
ROWS, DIM = 20, 4


def torchrec(module: str) -> Any:
    for needed in ("fbgemm_gpu", "torchrec"):
        pytest.importorskip(needed, reason=f"{needed} is not installed", exc_type=(ImportError, OSError))
    return importlib.import_module(f"torchrec.{module}")


def ids(*, weighted: bool = False) -> Any:
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (len(FEATURES) * 8,), generator=drawn)
    count = int(lengths.sum())
    return torchrec("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES),
        values=torch.randint(0, ROWS, (count,), generator=drawn),
        lengths=lengths,
        weights=torch.rand(count, generator=drawn) if weighted else None,
    )


def bags(pooling: str = "SUM", *, weighted: bool = False, shared: bool = False) -> nn.Module:
    configs, modules = torchrec("modules.embedding_configs"), torchrec("modules.embedding_modules")
    readers = [["f1", "f2"], ["f3"]] if shared else [["f1"], ["f2"], ["f3"]]
    tables = [
        configs.EmbeddingBagConfig(
            name=f"t{at}",
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=names,
            pooling=configs.PoolingType[pooling],
        )
        for at, names in enumerate(readers)
    ]
    made: nn.Module = modules.EmbeddingBagCollection(tables=tables, is_weighted=weighted)
    return made


def sequences(*, shared: bool = False) -> nn.Module:
    config = torchrec("modules.embedding_configs").EmbeddingConfig
    readers = [list(FEATURES)] if shared else [[name] for name in FEATURES]
    tables = [
        config(name=f"t{at}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=names)
        for at, names in enumerate(readers)
    ]
    made: nn.Module = torchrec("modules.embedding_modules").EmbeddingCollection(tables=tables)
    return made


def dlrm(kind: str, *arguments: Any) -> nn.Module:
    made: nn.Module = getattr(torchrec("models.dlrm"), kind)(bags(), 10, [8, DIM], [8, 1], *arguments)
    return made


def pooled(model: nn.Module) -> Tensor:
    values: Tensor = model(ids()).values()
    return values


def scored(model: nn.Module) -> Tensor:
    scores: Tensor = model(torch.rand(8, 10, generator=torch.Generator().manual_seed(3)), ids())
    return scores


def listed(model: nn.Module) -> Tensor:
    return torch.cat([each.values() for each in model(ids()).values()])


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "bags": (bags, pooled),
    "bags of means": (partial(bags, "MEAN"), pooled),
    "weighted bags": (partial(bags, weighted=True), lambda model: model(ids(weighted=True)).values()),
    "bags of one table": (partial(bags, shared=True), pooled),
    "sequences": (sequences, listed),
    "sequences of one table": (partial(sequences, shared=True), listed),
    "DLRM": (partial(dlrm, "DLRM"), scored),
    "DLRM_DCN": (partial(dlrm, "DLRM_DCN", 2, 4), scored),
    "DLRM_Projection": (partial(dlrm, "DLRM_Projection", [8, 8], [8, 8]), scored),
    "SimpleDeepFMNN": (lambda: torchrec("models.deepfm").SimpleDeepFMNN(10, bags(), 8, 4), scored),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_torchrec_has_the_losses_of_torch(name: str) -> None:
    make, call = MODULES[name]
    torch.manual_seed(1)
    assert_alike(losses_of_both(make(), lambda model: (call(model) ** 2).sum()))


def test_fused_bags_of_torchrec_are_refused() -> None:
    """They hold their optimizer, which steps within backward, and no layer of torch."""
    config = torchrec("modules.embedding_configs").EmbeddingBagConfig
    fused = torchrec("modules.fused_embedding_modules").FusedEmbeddingBagCollection(
        tables=[config(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=list(FEATURES))],
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
    )
    with (
        InProcessCluster(slot_count=16).connect() as session,
        pytest.raises(
            sr.errors.InvalidArgument, match=r"the model has no nn\.Embedding or nn\.EmbeddingBag of min_rows"
        ),
    ):
        session.distribute(fused, optimizer=sr.optim.Adagrad(lr=LR), min_rows=1)
