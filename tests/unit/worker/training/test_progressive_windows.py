"""Windows of training samples where workers do not meet, whose batches differ in size."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sparserow.proto.config.train_config import TrainConfig
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.progressive import ProgressiveMetrics


def result_of(samples: int, *, is_taken: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        is_taken=is_taken, logits=torch.zeros(samples), labels=torch.arange(samples, dtype=torch.float32) % 2
    )


def test_a_window_has_its_samples_whatever_the_sizes_of_batches() -> None:
    ends: list[int] = []
    group = WorkerGroup(0, 2, meets=False, device=torch.device("cpu"))
    metrics = ProgressiveMetrics(100, TrainConfig(batch_size=64), group, lambda _, samples, *__: ends.append(samples))
    for samples in (64, 0, 10, 25, 0, 3, 64):  # a step without samples is one of a worker that has no events
        metrics.add(1, result_of(samples), None)
    metrics.add(1, result_of(64, is_taken=False), None)
    assert ends == [102]
    again = ProgressiveMetrics(100, TrainConfig(batch_size=64), group, lambda _, samples, *__: ends.append(samples))
    again.load_state_dicts([metrics.state_dict()])
    again.add(1, result_of(35), None)
    assert ends == [102]
    again.add(1, result_of(1), None)
    assert ends == [102, 202]
    again.end_epoch(1)
    assert ends == [102, 202]
