"""DIN against its equations, and with any lengths of lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_features import array, assert_close, assert_model, keys, lists, numbers, parts, perceptron, rows_of, softmax
from sparserow.worker.models import DIN

ROWS = {"user": 40, "item": 500, "category": 7, "tags": 20}
HISTORY = {"clicked_items": "item", "clicked_categories": "category"}


def build(**options):
    torch.manual_seed(1)
    return DIN(ROWS, HISTORY, numbers=["age"], pools={"tags": "mean"}, dim=4, init_scale=0.5, **options)


def make(samples: int, is_empty: bool = False):
    lengths = [0 if is_empty else (5 * sample + 2) % 7 for sample in range(samples)]
    return {
        "user": keys(samples, 1),
        "item": keys(samples, 2),
        "category": keys(samples, 3),
        "age": numbers(samples, 4),
        "clicked_items": lists(lengths, 5),
        "clicked_categories": lists(lengths, 6),
        "tags": lists(lengths[::-1], 7),
    }


@pytest.mark.parametrize("is_normalised", [False, True])
def test_din_is_its_equations(is_normalised):
    model, tensors = build(hidden=[6], attention=[5], softmax=is_normalised), make(9)
    tables = model.embeddings.tables
    for sample, logit in enumerate(model(**tensors)):
        target = np.concatenate([rows_of(tables[name], tensors[name])[sample] for name in ("item", "category")])
        history = np.concatenate(
            [rows_of(tables[name], parts(tensors[feature])[sample]) for feature, name in HISTORY.items()], axis=1
        )
        interest = np.zeros(8)
        if len(history):
            units = [np.concatenate([target, each, target - each, target * each]) for each in history]
            scores = perceptron(model.attention, np.stack(units))[:, 0]
            interest = ((softmax(scores) if is_normalised else scores)[:, None] * history).sum(0)
        tags = rows_of(tables["tags"], parts(tensors["tags"])[sample])
        pooled = tags.mean(0) if len(tags) else np.zeros(4)
        user = rows_of(tables["user"], tensors["user"])[sample]
        everything = np.concatenate([interest, target, user, pooled, [array(tensors["age"])[sample]]])
        assert_close(logit, perceptron(model.deep, everything)[0])


@pytest.mark.parametrize("is_normalised", [False, True])
def test_din_takes_any_batch_and_is_exported(is_normalised):
    assert_model(build(hidden=[6], attention=[5], softmax=is_normalised), make)


def test_the_target_changes_what_of_the_history_counts():
    torch.manual_seed(0)
    model = DIN({"item": 20}, {"clicked": "item"}, dim=8, hidden=[16], attention=[16], init_scale=0.3)
    items = torch.randint(0, 20, (512,))
    values, offsets = torch.randint(0, 20, (512 * 3,)), torch.arange(513) * 3
    labels = (values.reshape(512, 3) == items[:, None]).any(1).float()  # 1 when the target was clicked before
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        logits = model(item=items, clicked=(values, offsets))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_what_does_not_fit_is_refused():
    for history, pools, text in (
        ({}, {}, "history={} is not allowed"),
        ({"clicked": "items"}, {}, r"shared\['clicked'\]='items' is not allowed; allowed: item"),
        ({"clicked": "item"}, {"clicked": "sum"}, r"history\['clicked'\]='item' is not pooled"),
        ({"clicked": "item", "bought": "item"}, {}, r"history\['clicked'\]='item' is given twice"),
    ):
        with pytest.raises(ValueError, match=text):
            DIN({"item": 9}, history, pools=pools)
    model = DIN({"item": 9, "kind": 3}, {"clicked": "item", "kinds": "kind"})
    tensors = {"item": keys(2), "kind": keys(2), "clicked": lists([1, 2]), "kinds": lists([1, 2])}
    with pytest.raises(ValueError, match="the model reads 'kinds', which is not there; there are: item, kind, clicked"):
        model(**{name: tensors[name] for name in ("item", "kind", "clicked")})
    with pytest.raises(ValueError, match="the model does not read 'price'; allowed: item, kind, clicked, kinds"):
        model(**tensors, price=numbers(2))
    with pytest.raises(ValueError, match="lists of 'kinds' and 'clicked' differ in length"):
        model(**{**tensors, "kinds": lists([2, 1])})
    with pytest.raises(ValueError, match="'clicked' has one value a sample; allowed: a list"):
        model(**{**tensors, "clicked": keys(2)})
