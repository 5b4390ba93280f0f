"""Models whose tables are on a cluster train as with local tables; a forward and a program have one pull each."""

from __future__ import annotations

import copy

import pytest
import torch

import sparserow as sr
from model_features import CLICKS, click_tensors, exported, keys, lists
from sparserow.worker.models import DIN, MMoE, SASRec, TwoTower, WideDeep


def with_history(samples, is_empty=False):
    lengths = [0 if is_empty else (5 * sample + 2) % 7 for sample in range(samples)]
    return {**click_tensors(samples, is_empty), "clicked": lists(lengths, 6)}


def with_candidates(samples, is_empty=False):
    history = lists([0 if is_empty else (5 * sample + 2) % 7 for sample in range(samples)], 6)
    return {"clicked": history, "item": lists([0 if is_empty else 3] * samples, 7)}


MODELS = {
    "wide_deep": (lambda: WideDeep(wide={"user": 40, "tags": 20}, **CLICKS), click_tensors, 5),
    "din": (lambda: DIN(history={"clicked": "item"}, **CLICKS), with_history, 4),
    "mmoe": (lambda: MMoE(tasks=["click", "buy"], **CLICKS), click_tensors, 3),
    "two_tower": (lambda: TwoTower(item=["item", "price"], temperature=1.0, **CLICKS), click_tensors, 3),
    "sasrec": (lambda: SASRec({"item": 500}, "item", "clicked", dim=8, candidates=3), with_candidates, 2),
}


def loss_of(out):
    return sum(each.square().sum() for each in (out.values() if isinstance(out, dict) else [out]))


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_a_local_model(name):
    make_model, make, lookups = MODELS[name]
    torch.manual_seed(1)
    local = make_model()
    local_optimizer = torch.optim.SGD(local.parameters(), lr=0.01)
    with sr.InProcessCluster(shards=2).connect(name.replace("_", "-")) as session:
        model = session.distribute(copy.deepcopy(local), optimizer=sr.optim.SGD(lr=0.01), min_rows=1)
        dense = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, (samples, is_empty) in enumerate([(9, False), (5, False), (0, True), (3, True), (17, False)]):
            tensors, before = make(samples, is_empty), session.stats().pulls
            found, expected = model(**tensors), local(**tensors)
            assert session.stats().pulls - before == (lookups if step == 0 else 1)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            loss_of(found).backward()
            session.step(dense)
            local_optimizer.zero_grad()
            loss_of(expected).backward()
            local_optimizer.step()
        assert session.stats().lookups_missed == 0
        model.eval()
        program, one = exported(model, make(4, False)), make(1, False)
        expected, before = model(**one), session.stats().pulls
        torch.testing.assert_close(program(one), expected)
        assert session.stats().pulls - before == 1, "the program has one lookup for all tables"


def test_prefetched_batches_have_the_rows_of_a_model_of_features():
    with sr.InProcessCluster(shards=2).connect("ahead") as session:
        model = session.distribute(MODELS["din"][0](), optimizer=sr.optim.SGD(lr=0.01), min_rows=1)
        dense = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = [{**with_history(9), "user": keys(9, seed)} for seed in range(5)]
        for batch in session.prefetch(batches):
            loss_of(model(**batch)).backward()
            session.step(dense)
        stats = session.stats()
        assert stats.rows_prefetched > 0
        assert stats.lookups_missed == 0


def test_a_compiled_model_is_one_graph_for_any_batch():
    torch._dynamo.reset()
    with sr.InProcessCluster(shards=2).connect("compiled") as session:
        local = MODELS["din"][0]()
        model = session.distribute(copy.deepcopy(local), optimizer=sr.optim.SGD(lr=0.01), min_rows=1).eval()
        compiled = sr.compile_model(model, backend="eager", fullgraph=True, dynamic=True)
        for samples, is_empty in ((9, False), (5, False), (1, True), (0, True)):
            tensors = with_history(samples, is_empty)
            torch.testing.assert_close(compiled(**tensors), local(**tensors), rtol=1e-4, atol=1e-5)
