"""Trains DLRM of torchrec on keyed jagged tensors, with its embedding bags on parameter servers.

    python -m sparserow.deploy.examples.torchrec_model

It needs torchrec, and the fbgemm that fits the installed torch; docs/foreign-models.md says which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import sparserow as sr

from .foreign_clicks import BATCH, COLUMNS, VALUES, Clicks, clicks, held_out_clicks


def make_model(session: sr.Session) -> Any:
    """Returns DLRM with its 4 tables on the servers."""
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=VALUES, embedding_dim=4) for name in COLUMNS
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    model = DLRM(bags, dense_in_features=1, dense_arch_layer_sizes=[8, 4], over_arch_layer_sizes=[16, 1])
    return session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.1), min_rows=VALUES)


def train(model: Any, optimizer: torch.optim.Optimizer, log: Clicks) -> None:
    """Trains two epochs with a loop like those in torchrec's tutorials."""
    model.train()
    for _ in range(2):
        for ids, labels in zip(log.ids.split(BATCH), log.labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(*features(ids)).squeeze(1), labels).backward()
            optimizer.step()


def features(ids: torch.Tensor) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Returns a batch of ids (n, columns) as DLRM takes it: constant dense features (n, 1), and sparse features."""
    sparse = KeyedJaggedTensor(
        keys=list(COLUMNS), values=ids.t().flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32)
    )
    return torch.ones(len(ids), 1), sparse


@torch.no_grad()
def scores(model: Any, log: Clicks) -> torch.Tensor:
    """Returns the logits (n) of the samples."""
    model.eval()
    logits: torch.Tensor = model(*features(log.ids))
    return logits.squeeze(1)


def main() -> None:
    """Trains on a cluster of its own, and prints the AUC."""
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, namespace="torchrec") as session:
        model, test = make_model(session), held_out_clicks()
        before = test.auc(scores(model, test))
        train(model, session.wrap(torch.optim.Adam(model.parameters(), lr=1e-2)), clicks())
        print(f"test AUC {before:.3f} before training, {test.auc(scores(model, test)):.3f} after it")


if __name__ == "__main__":
    main()
