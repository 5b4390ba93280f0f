"""Embeddings of features by name: rows by key, shared tables, pools of lists, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from model_features import array, assert_close, keys, lists, numbers, parts, rows_of
from sparserow.worker.models import FeatureEmbeddings
from sparserow.worker.models.jagged import aligned, padded, segment_max, segment_softmax, segment_sum

LENGTHS = [2, 0, 3, 1, 0]


def build(**options):
    torch.manual_seed(0)
    return FeatureEmbeddings({"user": 50, "item": 2**20}, 4, init_scale=0.5, **options)


def test_rows_are_keys_modulo_rows_and_numbers_come_last():
    tables = build(numbers=["age", "price"], shared={"other": "item"})
    tensors = {"user": keys(5, 1), "item": keys(5, 2), "other": keys(5, 3), "age": numbers(5), "price": numbers(5, 4)}
    fields = [rows_of(tables.tables[table], tensors[name]) for name, table in
              (("user", "user"), ("item", "item"), ("other", "item"))]  # fmt: skip
    assert tables.names == ("user", "item", "other")
    assert_close(tables(tensors), np.stack(fields, axis=1))
    assert_close(tables(tensors, ["item"]), fields[1][:, None])
    columns = [array(tensors[name])[:, None] for name in ("age", "price")]
    assert_close(tables.flat(tensors), np.concatenate([*fields, *columns], axis=1))
    assert_close(tables.stacked_numbers(tensors), np.concatenate(columns, axis=1))
    some = np.concatenate([array(tensors["price"])[:, None], fields[0]], axis=1)
    assert_close(tables.flat(tensors, ["price", "user"]), some)
    assert tables.width() == 14
    assert tables.width(["price", "user"]) == 5


def pooled_by_definition(rows, weights, pool):
    if not len(rows):
        return np.zeros(4)
    if pool == "max":
        return rows.max(0)
    total = (rows * weights[:, None]).sum(0)
    return total / {"sum": 1, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[pool]


@pytest.mark.parametrize("table", ["bag", "rows"])
@pytest.mark.parametrize(
    ("pool", "weighted"),
    [("sum", False), ("mean", False), ("sqrtn", False), ("max", False), ("sum", True), ("mean", True), ("sqrtn", True)],
)
def test_a_pool_is_its_definition(table, pool, weighted):
    shared = {} if table == "bag" else {"item_now": "item"}  # a key of the same table needs rows
    tables = build(pools={"item": pool}, shared=shared)
    assert isinstance(tables.tables["item"], nn.EmbeddingBag) == (table == "bag" and pool != "max")
    feature = lists(LENGTHS, 5, weights=weighted)
    weights = feature[2] if weighted else torch.ones(6)
    cut = parts((weights, feature[1]))
    expected = [
        pooled_by_definition(rows_of(tables.tables["item"], some), array(some_weights), pool)
        for some, some_weights in zip(parts(feature), cut, strict=True)
    ]
    found = tables({"item": feature}, ["item"])[:, 0]
    assert_close(found, np.stack(expected))
    found.square().sum().backward()
    assert torch.isfinite(tables.tables["item"].weight.grad).all()


@pytest.mark.parametrize("pool", ["sum", "mean", "sqrtn"])
def test_weights_of_zero_give_zeros_and_finite_gradients(pool):
    tables = build(pools={"item": pool})
    values, offsets = lists([2, 1], 5)
    weights = torch.zeros(3, requires_grad=True)  # a model may compute them
    found = tables({"item": (values, offsets, weights)}, ["item"])
    assert not found.any()
    found.sum().backward()
    for grad in (tables.tables["item"].weight.grad, weights.grad):
        assert torch.isfinite(grad).all()


def test_sparse_gradients_touch_the_rows_of_the_batch_alone():
    tables = build(sparse=True, pools={"item": "mean"})
    tables({"user": keys(3, below=50), "item": lists([1, 2, 0])}).sum().backward()
    for name in ("user", "item"):
        grad = tables.tables[name].weight.grad
        assert grad.is_sparse
        assert grad.coalesce().indices().shape[1] <= 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rows": {"a": 0}}, r"rows\['a'\]=0 is not allowed; allowed: an integer >= 1"),
        ({"rows": {"a": 2.5}}, r"rows\['a'\]=2.5"),
        ({"rows": {"a.b": 2}}, r"rows: 'a.b' is not allowed"),
        ({"rows": {"keys": 2}}, r"rows: 'keys' is not allowed"),
        ({"shared": {"b": "c"}}, r"shared\['b'\]='c' is not allowed; allowed: a"),
        ({"shared": {"a": "a"}}, r"feature 'a' is named twice"),
        ({"numbers": ["a"]}, r"feature 'a' is named twice"),
        ({"pools": {"b": "sum"}}, r"pools: there is no feature 'b'; allowed: a"),
        ({"pools": {"a": "median"}}, r"pools\['a'\]='median' is not allowed; allowed: sum, mean, sqrtn, max"),
    ],
)
def test_what_does_not_fit_is_refused(options, text):
    with pytest.raises(ValueError, match=text):
        FeatureEmbeddings(**{"rows": {"a": 5}, "dim": 4, **options})


def test_features_of_another_kind_are_refused():
    tables = build(pools={"item": "max"})
    with pytest.raises(ValueError, match="'user' is a list; allowed: one value a sample"):
        tables({"user": lists([1])}, ["user"])
    with pytest.raises(ValueError, match="'item' has one value a sample; allowed: a list"):
        tables({"item": keys(1)}, ["item"])
    with pytest.raises(ValueError, match="a list with weights cannot have the pool 'max'"):
        tables({"item": lists([1], weights=True)}, ["item"])
    with pytest.raises(ValueError, match="'user' has weights; allowed: a sequence"):
        tables.sequence({"user": lists([1], weights=True)}, "user")


def test_functions_of_lists_are_their_definitions():
    values, offsets = torch.randn(6, 2), torch.tensor([0, 2, 2, 5, 6, 6])
    cut = [array(part) for part in parts((values, offsets))]
    samples = torch.tensor([0, 0, 2, 2, 2, 3])
    assert_close(segment_sum(values, samples, 5), np.stack([part.sum(0) for part in cut]))
    assert_close(segment_max(values, samples, 5), np.stack([part.max(0) if len(part) else np.zeros(2) for part in cut]))
    softmax = segment_softmax(values[:, 0] * 1000, samples, 5)
    expected = [np.exp(1000 * (part[:, 0] - part[:, 0].max())) if len(part) else part[:, 0] for part in cut]
    assert_close(softmax, np.concatenate([part / part.sum() for part in expected]))
    places = torch.tensor([0, 1, 0, 2, 3, 0])
    expected = [cut[0][0], cut[0][1], np.zeros(2), cut[2][2], np.zeros(2), cut[3][0]]
    assert_close(aligned(values, offsets, torch.tensor([0, 0, 1, 2, 2, 3]), places), np.stack(expected))
    for keep_last in (False, True):
        rectangle, is_there = padded(values, offsets, 2, keep_last=keep_last)
        for sample, part in enumerate(cut):
            kept = part[-2:] if keep_last else part[:2]
            assert is_there[sample].tolist() == [place < len(kept) for place in range(2)]
            assert_close(rectangle[sample], np.concatenate([kept, np.zeros((2 - len(kept), 2))]))
