"""SASRec against its equations, its causality, and both kinds of candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model_features import array, assert_close, assert_model, keys, linear, lists, parts, rows_of, softmax
from sparserow.worker.metrics.losses import bpr
from sparserow.worker.models import SASRec

LENGTHS = [3, 0, 7, 1, 4, 5]  # of which 4 items are read


def build(**options):
    torch.manual_seed(1)
    model = SASRec({"item": 50}, "item", "clicked", dim=6, max_len=4, candidates=3, init_scale=0.5, **options)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # 1 and 0 would hide a mistake
    return model


def make(samples, is_empty=False):
    lengths = [0 if is_empty else LENGTHS[sample % 6] for sample in range(samples)]
    candidates = [0 if is_empty else 3 - sample % 2 for sample in range(samples)]
    return {"clicked": lists(lengths, 1), "item": lists(candidates, 2)}


def normed(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.eps)
    return x * array(layer.weight) + array(layer.bias)


def states_by_definition(model, history, heads):
    """The states of the newest four items of one sequence."""
    items = rows_of(model.embeddings.tables["item"], history[-4:])
    x = items + array(model.positions)[4 - len(items) :]
    for block in model.blocks:
        q, k, v = (linear(layer, normed(block.attention_norm, x)) for layer in (block.query, block.key, block.value))
        attended = np.zeros_like(x)
        width = 6 // heads
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            for t in range(len(x)):
                scores = np.array([q[t, part] @ k[s, part] / np.sqrt(width) for s in range(t + 1)])
                attended[t, part] = sum(w * v[s, part] for s, w in enumerate(softmax(scores)))
        x = x + attended
        hidden = np.maximum(linear(block.network[0], normed(block.network_norm, x)), 0)
        x = x + linear(block.network[3], hidden)
    return normed(model.norm, x)


@pytest.mark.parametrize("heads", [1, 2])
def test_sasrec_is_its_equations(heads):
    model, tensors = build(heads=heads), make(6)
    logits, (states, is_there) = model(**tensors), model.states(tensors["clicked"])
    users = model.user_vectors(clicked=tensors["clicked"])
    for sample, history in enumerate(parts(tensors["clicked"])):
        expected = states_by_definition(model, history, heads)
        assert is_there[sample].tolist() == [place < len(expected) for place in range(4)]
        assert_close(states[sample, : len(expected)], expected)
        user = expected[-1] if len(expected) else np.zeros(6)
        assert_close(users[sample], user)
        items = rows_of(model.embeddings.tables["item"], parts(tensors["item"])[sample])
        assert_close(logits[sample], np.concatenate([items @ user, [-1e4] * (3 - len(items))]))


def test_the_next_items_of_the_batch_are_candidates_of_each_other():
    model, history, items = build(), make(6)["clicked"], keys(6, 5)
    expected = model.user_vectors(clicked=history) @ model.item_vectors(items).T
    assert expected.shape == (6, 6)
    torch.testing.assert_close(model(clicked=history, item=items), expected)


def test_a_state_is_that_of_its_prefix_without_the_items_behind_it():
    model = build(blocks=1)
    values = keys(4, 7)
    whole, _ = model.states((values, torch.tensor([0, 4])))
    changed, _ = model.states((torch.cat([values[:3], keys(1, 8)]), torch.tensor([0, 4])))
    torch.testing.assert_close(whole[:, :3], changed[:, :3])
    assert not torch.allclose(whole[:, 3], changed[:, 3])


@pytest.mark.parametrize("heads", [1, 2])
def test_it_takes_any_batch_and_is_exported(heads):
    assert_model(build(heads=heads), make)


def test_in_batch_scores_are_exported_too():
    assert_model(build(), lambda samples, is_empty: {**make(samples, is_empty), "item": keys(samples, 5)})


def test_it_learns_what_follows_what():
    torch.manual_seed(0)
    model = SASRec({"item": 12}, "item", "clicked", dim=16, max_len=4, candidates=2, init_scale=0.1)
    starts = torch.randint(0, 12, (256,))
    history = ((starts[:, None] + torch.arange(3)) % 12).flatten(), torch.arange(257) * 3
    positive = (starts + 3) % 12
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(80):
        negative = (positive + torch.randint(1, 12, (256,), generator=torch.Generator().manual_seed(step))) % 12
        candidates = torch.stack([positive, negative], dim=1).flatten(), torch.arange(257) * 2
        optimizer.zero_grad()
        loss = bpr(model(clicked=history, item=candidates), torch.zeros(256))
        loss.backward()
        optimizer.step()
    scores = model(clicked=history, item=torch.arange(12).repeat(22)[:256])[:, :12]
    assert (scores.argmax(dim=1) == positive).float().mean() > 0.95


def test_dropout_only_while_training():
    model, tensors = build(dropout=0.5), make(6)
    assert not torch.equal(model(**tensors), model(**tensors))
    model.eval()
    assert torch.equal(model(**tensors), model(**tensors))


def test_what_does_not_fit_is_refused():
    for options, text in (
        ({"rows": {"other": 5}}, "allowed: the rows of item='item' alone"),
        ({"heads": 4}, "heads=4 is not allowed; allowed: a divisor of dim=6"),
        ({"max_len": 0}, "max_len=0, candidates=100: allowed: >= 1"),
        ({"history": "item"}, "feature 'item' is named twice"),
    ):
        with pytest.raises(ValueError, match=text):
            SASRec(**{"rows": {"item": 5}, "item": "item", "history": "clicked", "dim": 6, **options})
    with pytest.raises(ValueError, match="a list of 'item' is too long; allowed: candidates=3"):
        build()(clicked=lists([1]), item=lists([4]))
    with pytest.raises(ValueError, match="'clicked' has one value a sample; allowed: a list"):
        build()(clicked=keys(1), item=keys(1))
