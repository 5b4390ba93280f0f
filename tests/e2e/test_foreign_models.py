"""Models and loops of other libraries train rows on servers; a loop that would train none raises."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

import sparserow as sr
from sparserow.deploy.examples.foreign_clicks import VALUES, clicks
from sparserow.proto.errors import FailedPrecondition

# The modules that an example imports, and how many tables it has: torchrec needs a fbgemm of its own for each torch.
EXAMPLES = {
    "deepctr_model": (["deepctr_torch"], 8),
    "torchrec_model": (["fbgemm_gpu", "torchrec"], 4),
    "hugging_face_trainer": (["transformers", "accelerate"], 4),
    "lightning_trainer": (["pytorch_lightning"], 4),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


@pytest.fixture(params=EXAMPLES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def example(name: str) -> ModuleType:
    for module in EXAMPLES[name][0]:
        pytest.importorskip(module, reason=f"{module} is not installed", exc_type=(ImportError, OSError))
    return importlib.import_module(f"sparserow.deploy.examples.{name}")


def rows(session: sr.Session) -> dict[str, np.ndarray]:
    """Of all tables of the model, by table."""
    return {table: session.table(table).pull(np.arange(VALUES)) for table in session.core.bound_tables()}


def test_it_trains_its_rows_and_forgetting_to_wrap_raises(cluster: sr.LocalCluster, name: str, example: ModuleType):
    with sr.connect(cluster.address, namespace=name) as session:
        model = example.make_model(session)
        before = rows(session)
        assert len(before) == EXAMPLES[name][1]
        dense = torch.optim.Adam(model.parameters(), lr=1e-2)
        with pytest.raises(FailedPrecondition, match=r"Adam\.step\(\) moved .* needs session\.wrap\(optimizer\)"):
            example.train(model, dense, clicks(1_000, seed=3))
        session.discard()
        unmoved = rows(session)
        assert all(np.array_equal(unmoved[table], before[table]) for table in before)
        example.train(model, session.wrap(dense), clicks(4_000))
        stats = session.stats()
        assert stats.lookups_missed == 0
        assert stats.pulls_merged >= stats.steps_committed - 1 > 20, "the lookups of a forward are one pull"
        after = rows(session)
        for table, old in before.items():
            assert (after[table] != old).any(axis=1).mean() > 0.99, table


def test_a_trainer_that_makes_its_own_optimizer_raises(cluster: sr.LocalCluster) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    trainer = pytest.importorskip("sparserow.deploy.examples.hugging_face_trainer", exc_type=ImportError)
    with sr.connect(cluster.address, namespace="own_optimizer") as session:
        model = trainer.make_model(session)
        with pytest.raises(FailedPrecondition, match=r"AdamW\.step\(\) moved the dense parameters"):
            trainer.train(model, None, clicks(1_000))
        session.discard()


def test_the_script_learns(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    told = re.search(r"test AUC (\S+) before training, (\S+) after it", capsys.readouterr().out)
    assert told
    untrained, trained = map(float, told.groups())
    assert 0.4 < untrained < 0.6
    assert trained > 0.65
