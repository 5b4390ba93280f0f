"""Trains DeepFM of DeepCTR-Torch with the library's own ``fit``, and its embeddings on parameter servers.

    python -m sparserow.deploy.examples.deepctr_model

It needs ``pip install deepctr-torch``. docs/foreign-models.md explains the lines about the session.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deepctr_torch.inputs import SparseFeat
from deepctr_torch.models import DeepFM

import sparserow as sr

from .foreign_clicks import BATCH, COLUMNS, VALUES, Clicks, clicks, held_out_clicks


def make_model(session: sr.Session) -> Any:
    """Returns DeepFM with its 8 tables on the servers: a vector and a weight for each id."""
    columns = [SparseFeat(name, VALUES, embedding_dim=4) for name in COLUMNS]
    model = DeepFM(columns, columns, dnn_hidden_units=(16,), l2_reg_linear=0, l2_reg_embedding=0, seed=1)
    model.regularization_weight.clear()  # it lists weights that move to the servers
    return session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.1), min_rows=VALUES)


def train(model: Any, optimizer: torch.optim.Optimizer, log: Clicks) -> None:
    """Trains two epochs with ``fit``."""
    model.compile(optimizer, "binary_crossentropy")
    model.fit(_inputs(log), log.labels.numpy(), batch_size=BATCH, epochs=2, verbose=0)


def scores(model: Any, log: Clicks) -> torch.Tensor:
    """Returns the probabilities (n) from the library's ``predict``."""
    return torch.from_numpy(model.predict(_inputs(log), batch_size=BATCH)).flatten()


def _inputs(log: Clicks) -> dict[str, np.ndarray]:
    return {name: log.column(name).numpy() for name in COLUMNS}


def main() -> None:
    """Trains on a cluster of its own, and prints the AUC."""
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, namespace="deepctr") as session:
        model, test = make_model(session), held_out_clicks()
        before = test.auc(scores(model, test))
        train(model, session.wrap(torch.optim.Adam(model.parameters(), lr=1e-2)), clicks())
        print(f"test AUC {before:.3f} before training, {test.auc(scores(model, test)):.3f} after it")


if __name__ == "__main__":
    main()
