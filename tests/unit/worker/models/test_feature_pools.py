"""``pool`` of a feature, from a job file and lists in Parquet to pooled rows of a cluster, beside plain numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from torch import nn

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import feature_spec, fit_features, open_reader
from sparserow.worker.training.build_model import build_model, check_data

ROWS, DIM = 200, 4
POOLS = ["sum", "mean", "sqrtn", "max"]
JOB = """
data: {format: parquet, train: LOG, test: LOG, columns: {label: click}}
model: {class: DLRM, args: {rows: {user: 50, tags: 997, path: 31}, dim: 4, init_scale: 0.5}, min_rows: 900}
"""


class Plain(nn.Module):
    """A class of one's own that pools by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(997, DIM, include_last_offset=True)

    def forward(self, user: Any, tags: Any, path: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    tags = [[draw.randrange(1 << 40) for _ in range(draw.randrange(5))] for _ in range(ROWS)]
    table = pa.table(
        {
            "click": [at % 2 for at in range(ROWS)],
            "user": [draw.randrange(9) for _ in range(ROWS)],
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "weights": pa.array([[draw.randrange(-3, 9) / 4 for _ in each] for each in tags], pa.list_(pa.float64())),
            "path": ["/".join(draw.choice("xyz") for _ in range(draw.randrange(4))) for _ in range(ROWS)],
        }
    )
    path = tmp_path_factory.mktemp("pools") / "log.parquet"
    pa.parquet.write_table(table, path)
    return path, table


@pytest.fixture
def session() -> Iterator[sr.Session]:
    with sr.InProcessCluster(shards=2).connect("pools") as session:
        yield session


def job_of(log: Path, tags: str, *sets: str, path: str = "pool: mean") -> JobConfig:
    features = ["features.user={kind: id}", f"features.tags={{kind: multi_hot, {tags}}}"]
    features.append(f"features.path={{kind: split, delimiter: /, {path}}}")
    file = log.with_name("job.yaml")
    file.write_text(JOB.replace("LOG", str(log)))
    return load_config(JobConfig, file, [*features, *sets])


def literal(table: np.ndarray, tokens: list[Any], weights: list[float], pool: str) -> np.ndarray:
    rows = np.array([table[sr.hash_key(str(token)) % len(table)] for token in tokens], dtype=np.float64)
    if not tokens:
        return np.zeros(DIM)
    if pool == "max":
        return np.asarray(rows.max(axis=0))
    factors = np.array(weights)
    total = (rows * factors[:, None]).sum(axis=0)
    norm = {"sum": 1.0, "mean": factors.sum(), "sqrtn": np.sqrt(np.square(factors).sum())}[pool]
    return np.asarray(total / norm if norm else np.zeros(DIM))


@pytest.mark.parametrize(
    ("pool", "has_weights"), [(pool, has) for pool in POOLS for has in (False, True) if not (has and pool == "max")]
)
def test_a_pool_has_its_effect(log: tuple[Path, pa.Table], session: sr.Session, pool: str, has_weights: bool) -> None:
    path, table = log
    job = job_of(path, f"pool: {pool}" + (", weights: weights" if has_weights else ""))
    check_data(job)
    fitted = fit_features(job.data)
    (batch,) = open_reader(job.data, "train", fitted, ReadOptions(batch_size=ROWS))
    local = build_model(job.model, fitted.spec)
    weights = {name: each.weight.detach().numpy().copy() for name, each in local.embeddings.tables.items()}
    model = session.distribute(local, optimizer=sr.optim.SGD(lr=0.1), min_rows=900)
    found = model.embeddings(batch.tensors, ["tags", "path"]).detach().numpy()
    rows = table.to_pylist()
    for at, row in enumerate(rows):
        factors = row["weights"] if has_weights else [1.0] * len(row["tags"])
        wanted = literal(weights["tags"], row["tags"], factors, pool)
        np.testing.assert_allclose(found[at, 0], wanted, rtol=1e-4, atol=1e-4, err_msg=str(row))
        parts = row["path"].split("/") if row["path"] else []
        np.testing.assert_allclose(
            found[at, 1], literal(weights["path"], parts, [1.0] * len(parts), "mean"), rtol=1e-4, atol=1e-4
        )
    assert model(**batch.tensors).shape == (ROWS,)


@pytest.mark.parametrize(
    ("tags", "sets", "message"),
    [
        ("pool: sum", ["model.args.pools={tags: mean}"],
         r"features\.tags\.pool: is sum, and model\.args\.pools has 'mean' for it; name one of them"),
        ("pool: sum", [f"model={{class: '{__name__}:Plain', min_rows: 900}}"],
         r"features\.tags\.pool: has no effect, as .*:Plain has no argument pools, and pools by itself; remove it"),
    ],
)  # fmt: skip
def test_a_pool_without_an_effect_is_refused(
    log: tuple[Path, pa.Table], tags: str, sets: list[str], message: str
) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        check_data(job_of(log[0], tags, *sets))


def test_a_model_that_pools_by_itself_needs_no_pool(log: tuple[Path, pa.Table]) -> None:
    job = job_of(log[0], "max_len: 9", f"model={{class: '{__name__}:Plain', min_rows: 900}}", path="max_len: 9")
    check_data(job)
    assert isinstance(build_model(job.model, feature_spec(job.data)), Plain)
    same = job_of(log[0], "pool: mean", "model.args.pools={tags: mean, path: mean}")
    check_data(same)


def test_features_in_python_say_their_pools() -> None:
    features = sr.features.Features(
        [
            sr.features.MultiHotFeature("tags", pool="sqrtn"),
            sr.features.MultiHotFeature("seen"),
            sr.features.IdFeature("user"),
        ]
    )
    assert features.pools == {"tags": "sqrtn"}
