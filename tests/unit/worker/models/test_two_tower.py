"""The two-tower model against its equations, as two programs, and with corrected negatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_features import (
    array,
    assert_close,
    assert_model,
    exported,
    keys,
    lists,
    numbers,
    parts,
    perceptron,
    rows_of,
)
from sparserow.worker.metrics.losses import in_batch_softmax
from sparserow.worker.models import TwoTower

ITEM = ["item", "price"]


def build(**options):
    torch.manual_seed(1)
    return TwoTower(
        {"user": 40, "item": 500}, ITEM, numbers=["age", "price"], shared={"clicked": "item"},
        pools={"clicked": "mean"}, dim=4, hidden=[6], out=5, init_scale=0.5, **options,
    )  # fmt: skip


def make(samples, is_empty=False):
    return {
        "user": keys(samples, 1),
        "item": keys(samples, 2),
        "clicked": lists([0 if is_empty else sample % 3 for sample in range(samples)], 3),
        "age": numbers(samples, 4),
        "price": numbers(samples, 5),
    }


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def side(tensors, names):
    return {name: tensors[name] for name in names}


def test_scores_are_cosines_over_the_temperature():
    model, tensors = build(temperature=0.1), make(7)
    tables = model.embeddings.tables
    clicked = [rows_of(tables["item"], some) for some in parts(tensors["clicked"])]
    pooled = np.stack([rows.mean(0) if len(rows) else np.zeros(4) for rows in clicked])
    age, price = array(tensors["age"])[:, None], array(tensors["price"])[:, None]
    users = np.concatenate([rows_of(tables["user"], tensors["user"]), pooled, age], axis=1)
    items = np.concatenate([rows_of(tables["item"], tensors["item"]), price], axis=1)
    user_vectors = unit(perceptron(model.towers["user"], users))
    item_vectors = unit(perceptron(model.towers["item"], items))
    assert_close(model(**tensors), user_vectors @ item_vectors.T / 0.1)
    assert_close(model.user_vectors(**side(tensors, ["user", "clicked", "age"])), user_vectors)
    assert_close(model.item_vectors(**side(tensors, ITEM)), item_vectors)


def test_it_takes_any_batch_and_is_exported():
    assert_model(build(), make)


def test_each_tower_is_a_model_to_publish():
    model, tensors = build().eval(), make(6)
    for name, features, vectors in (
        ("user", ["user", "clicked", "age"], model.user_vectors),
        ("item", ITEM, model.item_vectors),
    ):
        given = side(tensors, features)
        program = exported(model.tower(name), given)
        torch.testing.assert_close(program(given), vectors(**given))
        one = side(make(1), features)
        torch.testing.assert_close(program(one), vectors(**one))


def test_what_a_job_publishes_has_the_score_of_each_row_and_its_vectors():
    model, tensors = build().eval(), make(6)
    program = exported(model.for_serving(), tensors)
    for given in (tensors, make(1)):
        out = program(given)
        assert list(out) == ["score", "user_vector", "item_vector"]
        torch.testing.assert_close(out["score"], model(**given).diagonal())
        torch.testing.assert_close(out["user_vector"], model.user_vectors(**side(given, ["user", "clicked", "age"])))
        torch.testing.assert_close(out["item_vector"], model.item_vectors(**side(given, ITEM)))


@pytest.mark.parametrize("is_corrected", [False, True])
def test_the_correction_keeps_frequent_items_from_being_pushed_down(is_corrected):
    """With a uniform taste, and items sampled by frequency, corrected scores are about equal; plain ones are not."""
    torch.manual_seed(0)
    frequency = torch.tensor([0.5, 0.25, 0.125, 0.125])
    model = TwoTower({"user": 1, "item": 4}, ["item"], dim=8, hidden=[], out=8, temperature=0.2, init_scale=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        items = torch.multinomial(frequency, 128, replacement=True)
        optimizer.zero_grad()
        logits = model(user=torch.zeros(128, dtype=torch.int64), item=items)
        in_batch_softmax(logits, torch.ones(128), logq=frequency.log()[items] if is_corrected else None).backward()
        optimizer.step()
    scores = model(user=torch.zeros(4, dtype=torch.int64), item=torch.arange(4))[0].detach()
    # A softmax whose negatives are sampled by q learns log p(item) - log q; the correction leaves log p(item).
    wanted = frequency.log() if is_corrected else torch.zeros(4)
    torch.testing.assert_close(scores - scores.mean(), wanted - wanted.mean(), atol=0.3, rtol=0)


def test_what_does_not_fit_is_refused():
    for item, text in (
        (["price"], "item='price' is not allowed; allowed: user, item"),
        ([], "allowed: some, but not all, of user, item"),
        (["user", "item"], "allowed: some, but not all, of user, item"),
    ):
        with pytest.raises(ValueError, match=text):
            TwoTower({"user": 4, "item": 4}, item)
    with pytest.raises(ValueError, match="temperature=0 is not allowed; allowed: > 0"):
        TwoTower({"user": 4, "item": 4}, ["item"], temperature=0)
    model, tensors = build(), make(2)
    with pytest.raises(ValueError, match="the model does not read 'user'; allowed: item, price"):
        model.item_vectors(**tensors)
    with pytest.raises(ValueError, match="side='query' is not allowed; allowed: user, item"):
        model.tower("query")
