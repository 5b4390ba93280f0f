"""Tries the forward of a job's model and the losses of its tasks, on a few samples and small local tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...proto.config.job import JobConfig
from ...proto.errors import InvalidArgument
from ...worker.data import Batch, NamedBatch
from ...worker.training.task_outputs import TaskOutputs
from ...worker.training.user_errors import line_of_error, place_of

TRIED_SAMPLES = 256
_ROWS = 16  # of a stand-in for a table


def try_forward(
    job: JobConfig,
    model: nn.Module,
    names: Sequence[str],
    batch: Batch,
    key_counts: Mapping[str, int],
) -> dict[int, int]:
    """Runs the forward in eval mode and the losses once, and the forward with the greatest keys of the features.

    Tables that were never allocated read as zeros.

    Args:
        job: the job.
        model: its model, built under ``deferred``; it cannot be used afterwards.
        names: the features that the model takes.
        batch: some samples.
        key_counts: how many keys a feature can give, from 0, by its name; others have no bound.

    Returns:
        The number of ids that each layer of a table looked up, by the ``id`` of the layer.

    Raises:
        InvalidArgument: the forward fails, looks up an id that its table does not have, or returns what does not fit
            the tasks; or a label does not fit its loss.
    """
    outputs = TaskOutputs(job.all_tasks)
    outputs.check(batch)
    (part,) = NamedBatch.of(batch, names, len(batch)).micro_batches
    counts, named = _use_small_tables(model), dict(part.tensors)
    outputs.loss(outputs.of(_forward(job, model, named), len(part)), part)
    looked_up = dict(counts)
    for name in named:
        if name in key_counts:
            _try_greatest(job, model, named, name, key_counts[name])
    return looked_up


def _forward(job: JobConfig, model: nn.Module, named: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return model.eval()(**named)
    except InvalidArgument:
        raise
    except Exception as error:  # the code of a model may raise anything
        text = line_of_error(error, place_of(error, job.model.class_))
        raise InvalidArgument(f"model: the forward of {job.model.class_} fails on the first samples: {text}") from error


def _try_greatest(job: JobConfig, model: nn.Module, named: dict[str, Any], name: str, keys: int) -> None:
    """Runs the forward with the greatest key of a feature in the first sample that has one: samples rarely have it, and
    a table that has no row for it ends the job when one does.
    """
    values, *others = named[name] if isinstance(named[name], tuple) else (named[name],)
    if not len(values):
        return
    values = values.clone()
    values[0] = keys - 1
    try:
        _forward(job, model, {**named, name: (values, *others) if others else values})
    except InvalidArgument as error:
        raise InvalidArgument(
            f"features.{name}: gives {keys} keys, 0 to {keys - 1}, and the model fails on the greatest: {error}"
        ) from error


def _use_small_tables(model: nn.Module) -> dict[int, int]:
    """Gives layers whose rows were never allocated a few rows, which all ids of the layer share; returns their counts
    of ids, which forwards increase.
    """
    counts: dict[int, int] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.weight.is_meta:
            rows = layer.num_embeddings
            layer.weight = nn.Parameter(torch.zeros(min(rows, _ROWS), layer.embedding_dim), requires_grad=False)
            layer.padding_idx = None
            layer.register_forward_pre_hook(_Folded(path, rows, counts), with_kwargs=True)
    return counts


class _Folded:
    """A forward hook that checks the ids of a layer, and takes them modulo the rows of its stand-in.

    Args:
        path: the path of the layer.
        rows: the number of rows of its table.
        counts: the counts of ids by the ``id`` of a layer, which it increases.
    """

    def __init__(self, path: str, rows: int, counts: dict[int, int]) -> None:
        self._path, self._rows, self._counts = path, rows, counts

    def __call__(
        self, layer: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = positional[0] if positional else named["input"]
        self._counts[id(layer)] = self._counts.get(id(layer), 0) + ids.numel()
        if positional:
            return (self._folded(ids), *positional[1:]), named
        return positional, {**named, "input": self._folded(ids)}

    def _folded(self, ids: Tensor) -> Tensor:
        wrong = ids[(ids < 0) | (ids >= self._rows)]
        if len(wrong):
            raise InvalidArgument(
                f"model: layer {self._path!r} looks up the id {int(wrong[0])}, which its table does not have; allowed: "
                f"0 to {self._rows - 1} (modulo of the feature, or ids % {self._rows} in forward)"
            )
        return torch.remainder(ids, min(self._rows, _ROWS))
