"""What a namespace keeps of features: a later run means the same by a key or a number, or is refused."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.proto.names import FEATURES_TABLE
from sparserow.worker.training.process_group import joined_group
from sparserow_process import Launcher, run_ranks

ROWS = 2000


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster


def prices(factor: float = 1.0, rows: int = ROWS) -> dict[str, Any]:
    draw = np.random.default_rng(rows)
    return {"price": draw.lognormal(size=rows) * factor, "user": draw.integers(0, 50, rows)}


def features(**options: Any) -> sr.features.Features:
    numeric = {"scale": "standardize", **options.get("price", {})}
    cut = {"column": "price", "quantiles": 8, **options.get("bucket", {})}
    kinds = {"user": sr.features.IdFeature, "pair": sr.features.CrossFeature, "hour": sr.features.TimeFeature}
    more = [kind(name, **options[name]) for name, kind in kinds.items() if name in options]
    return sr.features.Features(
        [sr.features.NumericFeature("price", **numeric), sr.features.BucketizedFeature("bucket", **cut), *more]
    )


def kept_by(
    cluster: sr.LocalCluster, namespace: str, made: sr.features.Features, data: Any, **options: Any
) -> dict[str, Any]:
    """Returns the statistics of features in a namespace, after a job of one worker has asked for them."""
    with sr.connect(cluster.address, namespace=namespace, **options.pop("connect", {})) as session:
        return dict(made.fit(data, session=session, **options).set.statistics)


def unread() -> Iterable[Any]:
    raise AssertionError("the data were read")
    yield


def test_a_later_run_uses_the_statistics_of_the_rows(
    cluster: sr.LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    first = kept_by(cluster, "later", features(), [prices()])
    assert first == dict(features().fit([prices()]).set.statistics)
    assert not caplog.records
    assert kept_by(cluster, "later", features(), unread()) == first
    assert "the statistics and vocabularies of price, bucket are those of an earlier run" in caplog.text
    assert kept_by(cluster, "elsewhere", features(), [prices(100)]) != first, "namespaces keep their own"
    # A feature that is new is learnt, from the data of the day, and the others are not learnt again.
    with sr.connect(cluster.address, namespace="later") as session:
        more = sr.features.Features(
            [*features().set.features, sr.features.NumericFeature("cost", column="price", scale="min_max")]
        )
        found = more.fit([prices(100)], session=session).set.statistics
    assert {name: found[name] for name in first} == first
    assert found["cost"][1] == pytest.approx(prices(100)["price"].max())


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_a_refit_takes_the_place_of_what_was_kept_and_nothing_grows(cluster: sr.LocalCluster, wire: str) -> None:
    namespace = f"refit {wire}"
    counts = set()
    for day in range(5):
        data = [prices(10.0**day)]
        made = kept_by(cluster, namespace, features(), data, features_policy="refit", connect={"wire_dtype": wire})
        assert made == dict(features().fit(data).set.statistics)
        with sr.connect(cluster.address, namespace=namespace, wire_dtype=wire) as session:
            counts.add(sum(len(keys) for keys, _ in session.table(FEATURES_TABLE).scan()))
    with sr.connect(cluster.address, namespace=namespace, wire_dtype=wire) as session:  # days in one session
        for day in range(2):
            data = [prices(10.0**day)]
            made = dict(features().fit(data, session=session, features_policy="refit").set.statistics)
            assert made == dict(features().fit(data).set.statistics)
    assert max(counts) <= 1 + math.ceil(2000 / 256), counts
    assert kept_by(cluster, namespace, features(), unread(), connect={"wire_dtype": wire}) == made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"price": {"scale": "min_max"}}, r"features\.price: .*scale: 'min_max' is not 'standardize'"),
        ({"price": {"log1p": True}}, r"features\.price: .*log1p: True is not False"),
        ({"price": {"statistics": (0.5, 2.0)}}, r"features\.price: .*statistics: \[0\.5, 2\.0\] are not \["),
        ({"bucket": {"quantiles": 4}}, r"features\.bucket: .*quantiles: 4 is not 8"),
        ({"bucket": {"column": "user"}}, r"features\.bucket: .*columns: \['user'\] is not \['price'\]"),
        ({"bucket": {"quantiles": None, "boundaries": (1.0,)}}, r"features\.bucket: .*statistics: \[1\.0\] are not \["),
        ({"user": {}}, r"features\.user: .*vocabulary: no vocabulary is not one of 2 lines"),
        ({"user": {"vocabulary": "other.txt"}}, r"features\.user: .*the first 2 lines of other\.txt are others"),
        ({"user": {"vocabulary": "short.txt"}}, r"features\.user: .*short\.txt has 1 lines, and the former had 2"),
        ({"user": {"vocabulary": "users.txt", "unknown": {"hash": 3}}}, r"features\.user: .*unknown_rows: 3 is not 1"),
        ({"pair": {"of": ["price", "user"], "modulo": 9}}, r"features\.pair: .*of: \['price', 'user'\] is not"),
        ({"pair": {"of": ["user", "price"], "modulo": 8}}, r"features\.pair: .*modulo: 8 is not 9"),
        ({"hour": {"column": "price", "unit": "s", "zone": "Asia/Tokyo"}}, r"features\.hour: .*zone: 'Asia/Tokyo' is"),
        ({"hour": {"column": "price", "unit": "s", "part": "day"}}, r"features\.hour: .*part: 'day' is not 'hour'"),
    ],
)
def test_others_are_refused_by_name(
    cluster: sr.LocalCluster, tmp_path: Path, change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("users.txt").write_text("1\n2\n")
    Path("other.txt").write_text("2\n1\n")
    Path("short.txt").write_text("1\n")
    user = {"user": {"vocabulary": "users.txt"}, "pair": {"of": ["user", "price"], "modulo": 9}}
    user["hour"] = {"column": "price", "unit": "s"}
    first = kept_by(cluster, "others", features(**user), [prices()])
    with sr.connect(cluster.address, namespace="others") as session:
        with pytest.raises(sr.errors.FailedPrecondition, match=f"(?s){words}.*features_policy refit"):
            features(**{**user, **change}).fit(unread(), session=session)
        same = features(**user, price={"statistics": first["price"]}).fit(unread(), session=session)
    assert dict(same.set.statistics) == first, "those that are given and equal are right"


@pytest.mark.parametrize("unknown", ["row", sr.features.HashUnknown(hash=3), "refuse"])
def test_a_vocabulary_grows_at_its_end(
    cluster: sr.LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, unknown: Any
) -> None:
    words = tmp_path / "words.txt"
    tokens = [["1", "2"], ["1", "2", "3"], ["1", "2", "3", "4"]]
    keys: dict[str, int] = {}
    namespace = f"grown {unknown}"
    for lines in tokens:
        words.write_text("\n".join(lines))
        made = features(user={"vocabulary": str(words), "unknown": unknown})
        with sr.connect(cluster.address, namespace=namespace) as session:
            fitted = made.fit([prices()], session=session)
        found = dict(zip(lines, fitted.set({"price": [1.0] * len(lines), "user": lines})["user"].tolist(), strict=True))
        assert keys.items() <= found.items(), "a token that had a key keeps it"
        assert len(set(found.values())) == len(lines)
        if unknown != "refuse":
            others = fitted.set({"price": [1.0] * 50, "user": range(100, 150)})["user"]
            assert not set(others.tolist()) & set(found.values()), "no token has the row of the unknown ones"
        keys = found
    assert [each.getMessage() for each in caplog.records if "grew" in each.getMessage()] == [
        f"features.user: the vocabulary grew from {lines} to {lines + 1} lines; the new lines have rows of their own"
        for lines in (2, 3)
    ]
    words.write_text("1\n2\n3\n")
    shorter = pytest.raises(sr.errors.FailedPrecondition, match=r"words\.txt has 3 lines, and the former had 4")
    with sr.connect(cluster.address, namespace=namespace) as session, shorter:
        features(user={"vocabulary": str(words), "unknown": unknown}).fit(unread(), session=session)


def test_they_are_saved_restored_and_dropped_with_the_namespace(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    first = kept_by(cluster, "saved", features(), [prices()])
    with sr.connect(cluster.address, namespace="saved") as session:
        session.save(str(tmp_path), wait=True)
    second = kept_by(cluster, "saved", features(), [prices(100)], features_policy="refit")
    assert second != first
    with sr.connect(cluster.address, namespace="saved") as session:
        session.restore(str(tmp_path))
        assert dict(features().fit(unread(), session=session).set.statistics) == first
    with sr.local_cluster(shards=3) as other, sr.connect(other.address, namespace="saved") as session:
        session.restore(str(tmp_path))
        assert dict(features().fit(unread(), session=session).set.statistics) == first
    with sr.connect(cluster.address, namespace="saved") as session:
        session.drop_table(FEATURES_TABLE)
        assert dict(features().fit([prices(100)], session=session).set.statistics) == second


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.buckets = nn.Embedding(9, 2)
        self.top = nn.Linear(3, 1)

    def forward(self, price: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.buckets(bucket), price[:, None]], 1)).squeeze(1)


def test_a_version_has_the_statistics_of_its_rows(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    with sr.connect(cluster.address, namespace="out") as session:
        made = features().fit([prices()], session=session)
        model = session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        others = features().fit([prices(100)])
        say = {"root": str(tmp_path), "model": model, "example": prices(rows=4)}
        with pytest.raises(sr.errors.FailedPrecondition, match=r"features\.price: .* keeps others .*statistics"):
            session.publish("net", features=others, **say)
        assert not list(tmp_path.iterdir()), "nothing is published"
        session.publish("net", features=made, **say)
    (manifest,) = tmp_path.glob("net/*/manifest.json")
    assert [table["schema"]["name"] for table in json.loads(manifest.read_text())["tables"]] == ["buckets"]


@pytest.mark.parametrize("policy", ["keep", "refit"])
def test_one_of_several_workers_learns_them(cluster: sr.LocalCluster, policy: str) -> None:
    """As a file may grow meanwhile, each would learn its own; with refit also where the namespace has others."""
    namespace = f"three {policy}"
    if policy == "refit":
        kept_by(cluster, namespace, features(), [prices(1000)], connect={"job": "before"})
    found: dict[int, dict[str, Any]] = {}
    reads: list[int] = []

    def data_of(rank: int) -> Iterable[Any]:
        reads.append(rank)
        yield prices(10.0**rank)

    def work(rank: int) -> None:
        options = {"rank": rank, "world_size": 3, "staleness": 4}
        found[rank] = kept_by(cluster, namespace, features(), data_of(rank), connect=options, features_policy=policy)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert reads == [0]
    learnt = dict(features().fit([prices()]).set.statistics)
    assert found == dict.fromkeys(range(3), learnt)


def test_a_refit_without_a_session_is_refused() -> None:
    with pytest.raises(sr.errors.InvalidArgument, match="features_policy: has no effect without session"):
        features().fit([prices()], features_policy="refit")


def test_rows_of_two_documents_are_refused(cluster: sr.LocalCluster) -> None:
    first = kept_by(cluster, "torn", features(), [prices()])
    with sr.connect(cluster.address, namespace="torn") as session:
        session.table(FEATURES_TABLE).delete([0])
        with pytest.raises(sr.errors.DataLoss, match=r"table torn/features\.json: its rows are of different contents"):
            features().fit(unread(), session=session)
        again = features().fit([prices()], session=session, features_policy="refit")
    assert dict(again.set.statistics) == first


def job_of(folder: Path, address: str, *, epochs: int = 1) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        f"name: day\ndata: {{format: parquet, train: {folder}/day.parquet, test: {folder}/day.parquet, columns: "
        "{label: click}}\n"
        "features: {user: {kind: id}, price: {kind: dense, scale: standardize}, "
        "bucket: {kind: bucketize, column: price, quantiles: 8}}\n"
        "model: {class: DeepFM, args: {rows: {'*': 2000}, dim: 4, hidden: [8]}, min_rows: 1}\n"
        f"train: {{epochs: {epochs}, batch_size: 512, checkpoint: {{url: {folder}/saves, every_steps: 1000}}}}\n"
        f"cluster: {{address: '{address}'}}\npublish: {{root: {folder}/models, model: day}}\n"
    )
    return path


def write_day(folder: Path, factor: float) -> None:
    clicks = (np.random.default_rng(5).random(ROWS) < 0.3).astype(np.int64)
    pa.parquet.write_table(pa.table({"click": clicks, **prices(factor)}), folder / "day.parquet")


def published_statistics(folder: Path) -> dict[str, Any]:
    newest = max((folder / "models" / "day").glob("*/features.json"), key=lambda path: path.stat().st_mtime_ns)
    found: dict[str, Any] = json.loads(newest.read_text())["statistics"]
    return found


def test_jobs_go_on_with_the_statistics_of_the_rows(
    cluster: sr.LocalCluster, launcher: Launcher, tmp_path: Path
) -> None:
    """On the cluster of the run before, and on another one from its checkpoint."""

    def run(address: str, *options: str, epochs: int = 1) -> dict[str, Any]:
        job = job_of(tmp_path, address, epochs=epochs)
        done = launcher.start("train", str(job), *options)
        assert done.popen.wait(300) == 0, done.err
        return published_statistics(tmp_path)

    write_day(tmp_path, 1.0)
    first = run(cluster.address)
    write_day(tmp_path, 100.0)
    assert run(cluster.address, "--overwrite-checkpoints") == first
    other = run(cluster.address, "--overwrite-checkpoints", "--set", "train.features_policy=refit")
    assert other["price"][0] == pytest.approx(100 * first["price"][0])
    write_day(tmp_path, 1.0)
    with sr.local_cluster(shards=1) as fresh:
        resumed = run(fresh.address, "--resume", "auto", "--set", "train.features_policy=refit", epochs=2)
    assert resumed == other, "a run that goes on never takes others"


def fit_in_group(rank: int, address: str, folder: str) -> None:
    """One rank of a process group: learns features, and then from data that cannot be read."""
    with (
        joined_group(rank, 2, f"file://{folder}/meet"),
        sr.connect(address, "group", rank=rank, world_size=2) as session,
    ):
        found = features().fit([prices()] if rank == 0 else unread(), session=session)
        more = sr.features.Features([sr.features.NumericFeature("cost", column="price", scale="min_max")])
        try:
            more.fit(unread(), session=session)
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    torch.save((dict(found.set.statistics), said), f"{folder}/rank{rank}.pt")


def test_ranks_that_meet_have_those_of_rank_0_and_its_failure(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    run_ranks(__file__, 2, cluster.address, tmp_path)
    (first, told), (second, heard) = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    assert first == second == dict(features().fit([prices()]).set.statistics)
    assert told == "AssertionError: the data were read"
    assert heard == ("FailedPrecondition: features: rank 0 could not learn them: AssertionError: the data were read")


if __name__ == "__main__":  # a rank of the last test
    fit_in_group(int(sys.argv[1]), sys.argv[2], sys.argv[3])
