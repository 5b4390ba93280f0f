"""The models: shapes, formulas, gradients, keys beyond any table, and that they know nothing of this package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from rooms import imports_of
from sparserow.worker import models
from sparserow.worker.models import DLRM, DeepFM, HashedEmbeddings, mlp

ROWS = {"u": 50, "v": 7, "w": 1000}


def inputs(batch: int, n_dense: int = 4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, n_dense, generator=generator), torch.randint(
        0, 2**63 - 1, (batch, 3), generator=generator
    )


def build(kind: str, **options):
    torch.manual_seed(1)
    return DLRM(4, ROWS, dim=8, **options) if kind == "dlrm" else DeepFM(4, ROWS, dim=8, **options)


@pytest.mark.parametrize("kind", ["dlrm", "deepfm"])
@pytest.mark.parametrize("batch", [0, 1, 33])
def test_shape_and_gradients(kind, batch):
    model = build(kind, init_scale=0.5)
    logits = model(*inputs(batch))
    assert logits.shape == (batch,)
    assert logits.dtype == torch.float32
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if batch == 33:
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", ["dlrm", "deepfm"])
def test_a_model_learns_an_interaction_of_two_keys(kind):
    torch.manual_seed(0)
    keys = torch.randint(0, 4, (512, 3)) + 2**62
    labels = ((keys[:, 0] + keys[:, 1]) % 2).float()
    model = build(kind, init_scale=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(torch.zeros(512, 4), keys), labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.1


def test_rows_are_keys_modulo_rows():
    tables = HashedEmbeddings(ROWS, 5)
    _, keys = inputs(9)
    out = tables(keys)
    assert out.shape == (9, 3, 5)
    for column, (name, rows) in enumerate(ROWS.items()):
        for sample in range(9):
            expected = tables.tables[name].weight[int(keys[sample, column]) % rows]
            torch.testing.assert_close(out[sample, column], expected, rtol=0, atol=0)


def test_huge_tables_are_free_on_the_meta_device():
    with torch.device("meta"):
        model = DLRM(4, {"u": 2**44, "v": 10**12}, dim=16)
    assert model.embeddings.tables["u"].num_embeddings == 2**44


def test_deepfm_is_its_formula():
    model = build("deepfm", init_scale=0.5).eval()
    dense, keys = inputs(6)
    looked_up = model.embeddings(keys)
    fields = torch.cat([dense[:, :, None] * model.dense_fields, looked_up], dim=1)
    expected = model.deep(torch.cat([dense, looked_up[:, :, 1:].flatten(1)], dim=1)).squeeze(1)
    for i in range(7):
        expected = expected + fields[:, i, 0]
        for j in range(i + 1, 7):
            expected = expected + (fields[:, i, 1:] * fields[:, j, 1:]).sum(dim=1)
    torch.testing.assert_close(model(dense, keys), expected, rtol=1e-4, atol=1e-5)


def test_dlrm_is_its_formula():
    model = build("dlrm", init_scale=0.5).eval()
    dense, keys = inputs(6)
    below = model.bottom(dense)
    vectors = [below, *model.embeddings(keys).unbind(1)]
    products = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    expected = model.top(torch.cat([below, torch.stack(products, dim=1)], dim=1)).squeeze(1)
    torch.testing.assert_close(model(dense, keys), expected, rtol=1e-4, atol=1e-5)


def test_models_without_numbers():
    _, keys = inputs(5)
    for model in (DLRM(0, ROWS), DeepFM(0, ROWS)):
        assert model(torch.empty(5, 0), keys).shape == (5,)


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
