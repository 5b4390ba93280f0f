"""Computes exact metrics of a model on a whole test set, over all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..data import Batch, ClickReader
from ..metrics.binary import auc, log_loss
from .process_group import WorkerGroup


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one pass over the test files.

    Attributes:
        auc: the exact area under the ROC curve, in which ties count half; NaN when a class is absent.
        log_loss: the mean log loss, in nats.
        samples: the number of samples.
    """

    auc: float
    log_loss: float
    samples: int


def evaluate(
    model: nn.Module,
    reader: ClickReader,
    group: WorkerGroup,
    placed: Callable[[Batch], Batch] = lambda batch: batch,
    *,
    forwards_meet: bool = False,
) -> Evaluation:
    """Scores every sample once and gathers the logits on rank 0, 8 bytes a sample; all ranks get the same result.

    The model is in eval mode meanwhile, so distributed tables are read without a clock. Its mode is restored.

    Args:
        model: the model.
        reader: the reader of this worker's share of the test files.
        group: this worker and its peers; every rank calls this function.
        placed: gives a batch on the model's device.
        forwards_meet: whether a forward has collective calls, so that each rank makes equally many.
    """
    was_training = model.training
    model.eval()
    logits, labels = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    try:
        with torch.no_grad():
            for batch in reader:
                if len(batch) or forwards_meet:
                    there = placed(batch)
                    logits.append(model(there.dense, there.sparse).float().cpu().numpy())
                    labels.append(batch.labels.numpy())
    finally:
        model.train(was_training)
    all_logits, all_labels = group.gather(np.concatenate(logits)), group.gather(np.concatenate(labels))
    if all_logits is None or all_labels is None:
        return group.share(Evaluation(float("nan"), float("nan"), 0))
    return group.share(Evaluation(auc(all_logits, all_labels), log_loss(all_logits, all_labels), len(all_labels)))
