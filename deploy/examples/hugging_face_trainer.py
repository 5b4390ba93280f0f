"""Trains a model with the Trainer of Hugging Face's transformers, and its embeddings on parameter servers.

    python -m sparserow.deploy.examples.hugging_face_trainer

It needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import sparserow as sr

from .click_model import ClickModel
from .foreign_clicks import BATCH, VALUES, Clicks, clicks, held_out_clicks


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples by index, in the form that the Trainer's collator takes."""

    def __init__(self, log: Clicks) -> None:
        self._log = log

    def __len__(self) -> int:
        return len(self._log.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self._log.ids[index], "labels": self._log.labels[index]}


def make_model(session: sr.Session) -> Any:
    """Returns the model with its 4 tables on the servers."""
    torch.manual_seed(1)
    return session.distribute(ClickModel(), optimizer=sr.optim.Adagrad(lr=0.2), min_rows=VALUES)


def train(model: Any, optimizer: torch.optim.Optimizer | None, log: Clicks) -> None:
    """Trains two epochs with the Trainer, which makes its own optimizer when ``optimizer`` is None."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=_Samples(log), optimizers=(optimizer, None)).train()


@torch.no_grad()
def scores(model: Any, log: Clicks) -> torch.Tensor:
    """Returns the logits (n) of the samples."""
    model.eval()
    logits: torch.Tensor = model(log.ids)["logits"]
    return logits


def main() -> None:
    """Trains on a cluster of its own, and prints the AUC."""
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, namespace="hugging_face") as session:
        model, test = make_model(session), held_out_clicks()
        before = test.auc(scores(model, test))
        train(model, session.wrap(torch.optim.Adam(model.parameters(), lr=1e-2)), clicks())
        print(f"test AUC {before:.3f} before training, {test.auc(scores(model, test)):.3f} after it")


if __name__ == "__main__":
    main()
