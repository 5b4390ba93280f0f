"""Outputs of a model by task: what fits, the losses, and the counts of items that a checkpoint keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparserow as sr
from sparserow.cpp_ext.torch_arrays import tensor_of
from sparserow.proto.checkpoint.state_tree import decode_tree
from sparserow.proto.config.tasks_config import Task
from sparserow.worker.checkpoint.state_tree import encode_tree
from sparserow.worker.data import Batch, NamedPart
from sparserow.worker.metrics.item_frequency import ItemFrequency
from sparserow.worker.metrics.losses import in_batch_softmax
from sparserow.worker.training.task_outputs import TaskOutputs


def test_outputs_and_labels_that_do_not_fit_are_named() -> None:
    outputs = TaskOutputs([Task("click", "click"), Task("rank", "rank", "softmax")])
    good = {"click": torch.zeros(3), "rank": torch.zeros(3, 2)}
    assert set(outputs.of(good, 3)) == {"click", "rank"}
    for out, message in (
        (torch.zeros(3), "forward returned Tensor; allowed: a mapping of a tensor for each of click, rank"),
        ({"click": torch.zeros(3)}, "outputs for click; the tasks are click, rank"),
        (good | {"click": torch.zeros(3, 1)}, r"tasks.click: forward returned \(3, 1\) for 3 samples; .* bce: \(B\)"),
        (good | {"rank": torch.zeros(3)}, r"tasks.rank: forward returned \(3,\) for 3 samples; .*softmax: \(B, C\)"),
    ):
        with pytest.raises(sr.errors.InvalidArgument, match=message):
            outputs.of(out, 3)
    batch = Batch(torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.int64), torch.tensor([0.0, 1.0, 2.0]))
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"tasks\.click: labels: 2\.0 of sample 2 is not allowed by bce"
    ):
        outputs.check(batch)
    part = NamedPart({}, torch.tensor([0.0, 1.0, 2.0]))
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"tasks\.rank: labels: 2\.0 of sample 2 is not allowed by softmax"
    ):
        TaskOutputs([Task("rank", "rank", "softmax")]).loss({"rank": torch.zeros(3, 2)}, part)


def test_without_samples_a_loss_has_gradients_of_zero() -> None:
    outputs = TaskOutputs([Task("click", "click"), Task("rank", "rank", "softmax")])
    weight = torch.ones(2, requires_grad=True)
    made = {"click": torch.zeros(0) * weight.sum(), "rank": torch.zeros(0, 2) * weight}
    loss = outputs.loss(outputs.of(made, 0), NamedPart({}, torch.zeros(0)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0]


def decoded(state: dict[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    data = b"".join(piece if isinstance(piece, bytes) else piece.tobytes() for piece in encode_tree(state, {}).pieces)
    return decode_tree(memoryview(data), "state", tensor_of)


def batches(count: int) -> list[tuple[torch.Tensor, NamedPart]]:
    random = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(6, 6, generator=random),
            NamedPart({"item": torch.randint(0, 5, (6,), generator=random)}, torch.ones(6)),
        )
        for _ in range(count)
    ]


def test_counts_of_items_correct_the_loss_and_are_kept() -> None:
    task = Task("next", "next", "in_batch_softmax", item="item")
    outputs, frequency = TaskOutputs([task]), ItemFrequency()
    for number, (scores, part) in enumerate(batches(8)):
        if number == 4:  # a run that goes on from its checkpoint
            state = decoded(outputs.state_dict())
            outputs = TaskOutputs([task])
            outputs.load_state_dict(state)
        items = part.tensors["item"]
        assert isinstance(items, torch.Tensor)
        wanted = in_batch_softmax(scores, part.labels, logq=frequency.update(items), items=items)
        torch.testing.assert_close(outputs.loss({"next": scores}, part), wanted)
    plain = in_batch_softmax(scores, part.labels)
    assert not torch.allclose(wanted, plain, atol=1e-3), "the correction has an effect"
