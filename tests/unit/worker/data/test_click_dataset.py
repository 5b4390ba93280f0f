"""``sr.data.ClickDataset``: the samples of files with features, in any training loop, from any position on."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sparserow as sr

ROWS = 1_000


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    draw = np.random.default_rng(3)
    paths = []
    for part in range(2):
        table = pa.table(
            {
                "click": draw.integers(0, 2, ROWS // 2).astype(np.int8),
                "user": [f"u{number}" for number in draw.integers(0, 50, ROWS // 2)],
                "row": np.arange(ROWS // 2, dtype=np.float32) + part * ROWS // 2,
                "seen": [[int(each) for each in draw.integers(0, 9, number % 3)] for number in range(ROWS // 2)],
            }
        )
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=90)
        paths.append(str(tmp_path / f"{part}.parquet"))
    return paths


def features(scale: str = "none") -> sr.features.Features:
    kinds = sr.features
    return kinds.Features(
        [
            kinds.IdFeature("user", modulo=100),
            kinds.NumericFeature("row", scale=scale),
            kinds.SequenceFeature("seen", max_len=2, modulo=10),
        ]
    )


def dataset(files: list[str], made: sr.features.Features | None = None, **options: object) -> sr.data.ClickDataset:
    given = {"file_format": "parquet", "columns": {"label": "click"}, "batch_size": 64, **options}
    return sr.data.ClickDataset(files, made or features(), **given)  # type: ignore[arg-type]


def rows_of(samples: sr.data.ClickDataset) -> list[list[float]]:
    return [batch.tensors["row"].tolist() for batch in samples]


def test_each_sample_comes_once_with_the_features_that_serving_has(files: list[str]) -> None:
    learnt = dataset(files, features("standardize"), shuffle_rows=0)
    tables = pa.concat_tables(pq.read_table(file) for file in files)
    wanted = learnt.features(tables)
    batches = list(learnt)
    assert [len(batch) for batch in batches] == [64] * 15 + [40]
    for name in ("user", "row"):
        assert torch.equal(torch.cat([batch.tensors[name] for batch in batches]), wanted[name])
    assert torch.equal(torch.cat([batch.tensors["seen"][0] for batch in batches]), wanted["seen"][0])
    assert torch.cat([batch.labels for batch in batches]).tolist() == tables["click"].to_pylist()
    # A dataset of other files has the statistics of these.
    other = dataset(files[:1], learnt.features, shuffle_rows=0)
    assert next(iter(other)).tensors["row"][0] == wanted["row"][0]


def test_workers_read_disjoint_samples_and_each_epoch_has_its_order(files: list[str]) -> None:
    workers = [dataset(files, rank=rank, world_size=2, seed=5) for rank in range(2)]
    first, second = ([sorted(chain(*rows_of(each))) for each in workers] for _ in range(2))
    for read in (first, second):
        assert sorted(read[0] + read[1]) == list(range(ROWS))
    assert first != second
    assert [each.epoch for each in workers] == [2, 2]


def test_it_goes_on_where_a_state_was_taken(files: list[str]) -> None:
    whole = rows_of(dataset(files, seed=1))
    begun = dataset(files, seed=1)
    batches = iter(begun)
    first = [next(batches).tensors["row"].tolist() for _ in range(5)]
    later = dataset(files, seed=1)
    later.load_state_dict(begun.state_dict())
    assert first + rows_of(later) == whole
    with pytest.raises(sr.errors.InvalidArgument, match="reader state"):
        dataset(files, seed=2).load_state_dict(begun.state_dict())
    # Another number of workers reads what is left.
    now = [dataset(files, seed=1, rank=rank, world_size=3) for rank in range(3)]
    for each in now:
        each.load_state_dicts([begun.state_dict()])
    assert sorted(chain(*(row for each in now for row in rows_of(each)))) == sorted(chain(*whole[5:]))


def test_a_session_trains_on_it_ahead_of_its_steps(files: list[str]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.head = nn.Embedding(100, 4), nn.Linear(5, 1)

        def forward(self, user: torch.Tensor, row: torch.Tensor, **_: object) -> torch.Tensor:
            return self.head(torch.cat([self.user(user), row[:, None] / ROWS], dim=1)).squeeze(1)

    with sr.InProcessCluster().connect("ads") as session:
        model = session.distribute(Net(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        ahead = session.prefetch(dataset(files, session=session), depth=2, always=True)
        for batch in ahead:
            out = model(**batch.tensors)
            nn.functional.binary_cross_entropy_with_logits(out, batch.labels).backward()
            session.step(dense)
        assert session.current_step == 16
        assert session.stats().rows_prefetched > 0
        assert ahead.state_dict()


def test_a_text_is_read_with_its_dialect(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("click;user;row;seen\n1;a;0.5;3|4\n0;b;1.5;\n1;oops;x;1\n")
    columns = {"label": "click", "header": True, "delimiter": ";", "list_delimiter": "|"}
    read = dataset([str(tmp_path / "log.csv")], file_format="csv", columns=columns, on_bad_line="skip", shuffle_rows=0)
    (batch,) = read
    assert batch.tensors["row"].tolist() == [0.5, 1.5]
    assert batch.labels.tolist() == [1.0, 0.0]
    assert read.bad_lines == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {}}, r"ClickDataset: .*label"),
        ({"columns": {"label": "nope"}}, "nope"),
        ({"columns": {"label": "click", "categorical": ["user"]}}, r"columns\.categorical: unknown key"),
        ({"file_format": "avro"}, "format: 'avro' is not allowed"),
        ({"batch_size": 0}, "batch_size: 0 is not allowed"),
        ({"rank": 2, "world_size": 2}, "rank: 2 is not allowed"),
        ({"where": "nope > 1"}, "nope"),
    ],
)
def test_a_wrong_argument_is_named(files: list[str], options: dict[str, object], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        list(dataset(files, **options))


def test_a_loader_reads_it_without_workers_of_its_own(files: list[str]) -> None:
    assert len(list(DataLoader(dataset(files), batch_size=None))) == 16
    with pytest.raises(sr.errors.NotFound):
        dataset([*files, "/nowhere.parquet"])
