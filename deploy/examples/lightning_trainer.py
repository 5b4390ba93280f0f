"""Trains a model with Lightning, and its embeddings on parameter servers.

    python -m sparserow.deploy.examples.lightning_trainer

It needs ``pip install pytorch-lightning``; with the package ``lightning`` import ``lightning.pytorch`` instead.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import sparserow as sr

from .click_model import ClickModel
from .foreign_clicks import BATCH, VALUES, Clicks, clicks, held_out_clicks


class _Task(pl.LightningModule):  # type: ignore[misc]
    """The module that Lightning trains, with an optimizer that the caller provides."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self._optimizer = model, optimizer

    def training_step(self, batch: Any) -> torch.Tensor:
        """Returns the loss of a batch."""
        ids, labels = batch
        loss: torch.Tensor = self.model(ids, labels)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns ``session.wrap(dense)``, so that each step of Lightning is a step of the session."""
        return self._optimizer


def make_model(session: sr.Session) -> Any:
    """Returns the model with its 4 tables on the servers."""
    torch.manual_seed(1)
    return session.distribute(ClickModel(), optimizer=sr.optim.Adagrad(lr=0.2), min_rows=VALUES)


def train(model: Any, optimizer: torch.optim.Optimizer, log: Clicks) -> None:
    """Trains two epochs with Lightning's Trainer."""
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model.train()  # Lightning keeps the mode that it finds, and rows are trained only in this mode
    trainer.fit(_Task(model, optimizer), DataLoader(TensorDataset(log.ids, log.labels), batch_size=BATCH))


@torch.no_grad()
def scores(model: Any, log: Clicks) -> torch.Tensor:
    """Returns the logits (n) of the samples."""
    model.eval()
    logits: torch.Tensor = model(log.ids)["logits"]
    return logits


def main() -> None:
    """Trains on a cluster of its own, and prints the AUC."""
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, namespace="lightning") as session:
        model, test = make_model(session), held_out_clicks()
        before = test.auc(scores(model, test))
        train(model, session.wrap(torch.optim.Adam(model.parameters(), lr=1e-2)), clicks())
        print(f"test AUC {before:.3f} before training, {test.auc(scores(model, test)):.3f} after it")


if __name__ == "__main__":
    main()
