"""The models: shapes, formulas, gradients, keys beyond any table, and that they know nothing of this package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from rooms import imports_of
from sparserow.worker import models
from sparserow.worker.models import DLRM, DeepFM, FeatureEmbeddings, mlp

ROWS = {"u": 50, "v": 7, "w": 1000}
NUMBERS = ("a", "b", "c", "d")


def inputs(batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = {name: torch.randn(batch, generator=generator) for name in NUMBERS}
    return numbers | {name: torch.randint(0, 2**63 - 1, (batch,), generator=generator) for name in ROWS}


def build(kind: type[nn.Module], **options):
    torch.manual_seed(1)
    return kind(ROWS, numbers=NUMBERS, dim=8, **options)


@pytest.mark.parametrize("kind", [DLRM, DeepFM])
@pytest.mark.parametrize("batch", [0, 1, 33])
def test_shape_and_gradients(kind, batch):
    model = build(kind, init_scale=0.5)
    logits = model(**inputs(batch))
    assert logits.shape == (batch,)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if batch == 33:
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", [DLRM, DeepFM])
def test_a_model_learns_an_interaction_of_two_keys(kind):
    torch.manual_seed(0)
    keys = torch.randint(0, 4, (512, 3)) + 2**62
    labels = ((keys[:, 0] + keys[:, 1]) % 2).float()
    model = build(kind, init_scale=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        tensors = dict.fromkeys(NUMBERS, torch.zeros(512)) | dict(zip(ROWS, keys.unbind(1), strict=True))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(**tensors), labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_rows_are_keys_modulo_rows():
    tables = FeatureEmbeddings(ROWS, 5)
    tensors = inputs(9)
    out = tables(tensors)
    assert out.shape == (9, 3, 5)
    assert tables.rows_by_feature == ROWS
    for column, (name, rows) in enumerate(ROWS.items()):
        for sample in range(9):
            expected = tables.tables[name].weight[int(tensors[name][sample]) % rows]
            torch.testing.assert_close(out[sample, column], expected, rtol=0, atol=0)


def test_huge_tables_are_free_on_the_meta_device():
    with torch.device("meta"):
        model = DLRM({"u": 2**44, "v": 10**12}, dim=16)
    assert model.embeddings.tables["u"].num_embeddings == 2**44


def test_dropout_only_while_training():
    layers = mlp([4, 16, 1], 0.5)
    x = torch.ones(3, 4)
    assert not torch.equal(layers(x), layers(x))
    layers.eval()
    assert torch.equal(layers(x), layers(x))


def test_models_import_nothing_of_this_package():
    wrong = []
    for path in sorted(Path(models.__file__).parent.glob("*.py")):
        for node in imports_of(path):
            if isinstance(node, ast.ImportFrom):
                is_ours = node.level > 1 or (not node.level and (node.module or "").split(".")[0] == "sparserow")
            else:
                is_ours = any(alias.name.split(".")[0] == "sparserow" for alias in node.names)
            if is_ours:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
