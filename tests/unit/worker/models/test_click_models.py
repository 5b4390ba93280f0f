"""Wide & Deep, DCN and AutoInt against their equations, for any batch, and as published programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_features import (
    CLICKS,
    array,
    assert_close,
    assert_model,
    click_fields,
    click_inputs,
    click_tensors,
    keys,
    linear,
    perceptron,
    rows_of,
    softmax,
)
from sparserow.worker.models import DCN, DLRM, AutoInt, DeepFM, WideDeep

DCNS = [
    {"cross": cross, "structure": structure} for cross in ("matrix", "vector") for structure in ("stacked", "parallel")
]
DCNS += [{"cross": "mixture", "rank": 3, "experts": 2}, {"cross": "mixture", "hidden": []}]


def build(kind, **options):
    torch.manual_seed(1)
    model = kind(**{**CLICKS, **options})
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.uniform_(parameter, -0.5, 0.5)  # a bias of 0 hides a mistake
    return model


def with_cross(samples, is_empty=False):
    return {**click_tensors(samples, is_empty), "user_item": keys(samples, 9)}


def test_wide_and_deep_is_its_equation():
    model = build(WideDeep, wide={"user": 40, "tags": 20, "user_item": 1000}, hidden=[6])
    tensors = with_cross(9)
    wide = model.wide.tables
    assert {name: tuple(table.weight.shape) for name, table in wide.items()} == {
        "user": (40, 1), "tags": (20, 1), "user_item": (1000, 1)}  # fmt: skip
    values, offsets, _ = tensors["tags"]
    tags = [rows_of(wide["tags"], values[offsets[i] : offsets[i + 1]])[:, 0] for i in range(9)]
    weights = [array(tensors["tags"][2])[offsets[i] : offsets[i + 1]] for i in range(9)]
    linear_part = sum(rows_of(wide[name], tensors[name])[:, 0] for name in ("user", "user_item"))
    linear_part = linear_part + np.array([(t * w).sum() for t, w in zip(tags, weights, strict=True)])
    deep = perceptron(model.deep, click_inputs(model.embeddings.tables, tensors))[:, 0]
    assert_close(model(**tensors), linear_part + deep)


def test_a_list_can_be_in_the_wide_part_alone():
    model = WideDeep({"user": 9}, {"tags": 20}, pools={"tags": "mean"})
    tensors = click_tensors(3)
    assert model(user=tensors["user"], tags=tensors["tags"]).shape == (3,)
    for wide, text in (({}, "wide={} is not allowed"), ({"user": 0}, r"wide: rows\['user'\]=0 is not allowed")):
        with pytest.raises(ValueError, match=text):
            WideDeep({"user": 9}, wide)
    with pytest.raises(ValueError, match="pools: there is no feature 'tag'; allowed: user"):
        WideDeep({"user": 9}, {"tags": 20}, pools={"tag": "sum"})


def crossed(layer, x0, x):
    """The next x of a cross layer, sample by sample, as the papers write it."""
    out = []
    for a, b in zip(x0, x, strict=True):
        if type(layer).__name__ == "VectorCross":
            out.append(a * (array(layer.weight.weight)[0] @ b) + array(layer.bias) + b)
        elif type(layer).__name__ == "MatrixCross":
            out.append(a * (array(layer.weight.weight) @ b + array(layer.weight.bias)) + b)
        else:
            gates = softmax(array(layer.gate.weight) @ b)
            total = b
            for gate, down, between, up in zip(gates, layer.down, layer.between, layer.up, strict=True):
                low = np.tanh(array(between.weight) @ np.tanh(array(down.weight) @ b))
                total = total + gate * (a * (array(up.weight) @ low + array(layer.bias)))
            out.append(total)
    return np.stack(out)


@pytest.mark.parametrize("options", DCNS, ids=lambda options: "-".join(map(str, options.values())))
def test_dcn_is_its_equations(options):
    model, tensors = build(DCN, layers=2, **{"hidden": [6, 5], **options}), click_tensors(9)
    x0 = x = click_inputs(model.embeddings.tables, tensors)
    for layer in model.crosses:
        x = crossed(layer, x0, x)

    def deep(inputs):  # the last layer of the MLP is activated too
        return np.maximum(perceptron(model.deep, inputs), 0) if len(model.deep) else inputs

    out = np.concatenate([x, deep(x0)], axis=1) if options.get("structure") == "parallel" else deep(x)
    assert_close(model(**tensors), linear(model.last, out)[:, 0])


def test_cross_layers_have_the_options_of_their_kind_alone():
    for options, text in (
        ({"cross": "tensor"}, "cross='tensor' is not allowed; allowed: matrix, vector, mixture"),
        ({"structure": "both"}, "structure='both' is not allowed; allowed: stacked, parallel"),
        ({"rank": 4}, "rank=4, experts=None: cross='matrix' has neither"),
    ):
        with pytest.raises(ValueError, match=text):
            DCN({"user": 9}, **options)


@pytest.mark.parametrize("hidden", [[], [6]])
def test_autoint_is_its_equations(hidden):
    model, tensors = build(AutoInt, layers=2, heads=2, head=3, hidden=hidden), click_tensors(9)
    embedded = click_fields(model.embeddings.tables, tensors)
    scalars = np.stack([array(tensors["age"]), array(tensors["price"])], axis=1)
    first = np.concatenate([embedded, scalars[:, :, None] * array(model.number_fields)], axis=1)
    logits = []
    for fields in first:
        x = fields
        for layer in model.attention:
            heads = []
            for head in range(2):
                part = slice(3 * head, 3 * head + 3)
                query, key, value = (array(each.weight)[part] for each in (layer.query, layer.key, layer.value))
                attended = np.zeros((5, 3))
                for m in range(5):
                    weights = softmax(np.array([(query @ x[m]) @ (key @ x[k]) for k in range(5)]))
                    attended[m] = sum(weights[k] * (value @ x[k]) for k in range(5))
                heads.append(attended)
            x = np.maximum(np.concatenate(heads, axis=1) + x @ array(layer.residual.weight).T, 0)
        logit = linear(model.last, x.reshape(-1))[0]
        logits.append(logit + (perceptron(model.deep, fields.reshape(-1))[0] if hidden else 0))
    assert_close(model(**tensors), np.array(logits))


@pytest.mark.parametrize("has_numbers", [True, False])
def test_dlrm_is_its_formula(has_numbers):
    model, tensors = build(DLRM, **({} if has_numbers else {"numbers": []})), click_tensors(9)
    fields = click_fields(model.embeddings.tables, tensors)
    inputs, vectors = [], fields
    if has_numbers:
        below = np.maximum(perceptron(model.bottom, click_inputs(model.embeddings.tables, tensors)[:, -2:]), 0)
        inputs, vectors = [below], np.concatenate([below[:, None], fields], axis=1)
    else:
        del tensors["age"], tensors["price"]
    count = vectors.shape[1]
    products = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(count) for j in range(i + 1, count)]
    assert_close(model(**tensors), perceptron(model.top, np.concatenate([*inputs, np.stack(products, 1)], 1))[:, 0])


@pytest.mark.parametrize("has_numbers", [True, False])
def test_deepfm_is_its_formula(has_numbers):
    model, tensors = build(DeepFM, **({} if has_numbers else {"numbers": []})), click_tensors(9)
    looked_up = click_fields(model.embeddings.tables, tensors)
    inputs, fields = looked_up[:, :, 1:].reshape(9, -1), looked_up
    if has_numbers:
        scalars = np.stack([array(tensors["age"]), array(tensors["price"])], axis=1)
        fields = np.concatenate([fields, scalars[:, :, None] * array(model.number_fields)], axis=1)
        inputs = np.concatenate([scalars, inputs], axis=1)
    else:
        del tensors["age"], tensors["price"]
    expected = perceptron(model.deep, inputs)[:, 0] + fields[:, :, 0].sum(1)
    for i in range(fields.shape[1]):
        for j in range(i + 1, fields.shape[1]):
            expected = expected + (fields[:, i, 1:] * fields[:, j, 1:]).sum(1)
    assert_close(model(**tensors), expected)


def test_models_need_what_they_multiply():
    with pytest.raises(ValueError, match=r"rows={'user': 5}, numbers=\[\]: allowed: two vectors or more"):
        DLRM({"user": 5})
    with pytest.raises(ValueError, match=r"rows={} is not allowed"):
        DeepFM({}, numbers=["age"])
    with pytest.raises(ValueError, match=r"width 0 of an MLP is not allowed; allowed: an integer >= 1"):
        DLRM({"user": 5, "item": 5}, top=[4, 0])
    with pytest.raises(ValueError, match=r"dropout=1 is not allowed; allowed: a number >= 0 and < 1"):
        DLRM({"user": 5, "item": 5}, dropout=1)


@pytest.mark.parametrize("kind", [DCN, AutoInt])
def test_numbers_or_keys_alone_will_do(kind):
    tensors = click_tensors(3)
    some = {name: tensors[name] for name in ("age", "price")}
    assert kind({}, numbers=["age", "price"])(**some).shape == (3,)
    assert kind({"user": 7})(user=tensors["user"]).shape == (3,)
    with pytest.raises(ValueError, match="allowed: at least one feature"):
        kind({})


@pytest.mark.parametrize(
    ("kind", "options", "make"),
    [
        (WideDeep, {"wide": {"user": 40, "tags": 20, "user_item": 1000}}, with_cross),
        *((DCN, {"layers": 2, **options}, click_tensors) for options in DCNS),
        (AutoInt, {"layers": 2}, click_tensors),
        (AutoInt, {"hidden": [6]}, click_tensors),
        (DLRM, {}, click_tensors),
        (DeepFM, {}, click_tensors),
    ],
)
def test_it_takes_any_batch_and_is_exported(kind, options, make):
    assert_model(build(kind, **options), make)
