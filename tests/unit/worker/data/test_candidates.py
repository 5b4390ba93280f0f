"""Drawn negatives: a pure function of (seed, epoch, sample), with the distribution that the job asks for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.config.tasks_config import NegativesConfig, Task
from sparserow.proto.options.document import validate
from sparserow.worker.data import Batch, ClickReader, NamedPart, ReadOptions
from sparserow.worker.data.candidates import CandidateSampler, ItemCounter, ItemTable
from sparserow.worker.data.sources import fit_features, item_table, open_reader
from sparserow.worker.training.candidate_items import candidate_sampler
from sparserow.worker.training.evaluation import evaluate
from sparserow.worker.training.job_readers import open_readers
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.task_outputs import TaskOutputs

ROWS, ITEMS, NEGATIVES, SEED = 3_000, 20, 4, 11


def job_of(folder: Path, kind: str = "popularity", **changes: Any) -> JobConfig:
    """A job over samples whose item i is there about i + 1 times as often as item 0."""
    draw = np.random.default_rng(SEED)
    items = draw.choice(ITEMS, ROWS, p=np.arange(1, ITEMS + 1) / (ITEMS * (ITEMS + 1) / 2))
    table = pa.table({"item": items, "row": np.arange(ROWS, dtype=np.float32), "click": (np.arange(ROWS) % 4 > 0) * 1})
    for name in ("train", "test"):
        pa.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=700)
    document: dict[str, Any] = {
        "data": {
            "format": "parquet",
            "train": str(folder / "train.parquet"),
            "test": str(folder / "test.parquet"),
            "columns": {"label": "click"},
            "shuffle_rows": 1000,
        },
        "features": {"item": {"kind": "id", "modulo": 1_000_000}, "row": {"kind": "dense"}},
        "model": {"class": "SASRec"},
        "tasks": {"next": {"loss": "softmax", "item": "item", "negatives": {"kind": kind, "per_positive": NEGATIVES}}},
        "train": {"seed": SEED},
    }
    return validate(JobConfig, {**document, **changes})


def keys_of() -> np.ndarray:
    """The key of each item, by its number."""
    features = sr.features.Features([sr.features.IdFeature("item", modulo=1_000_000)])
    keys = features({"item": np.arange(ITEMS)})["item"].numpy()
    assert len(set(keys.tolist())) == ITEMS
    return keys


def sampler_of(job: JobConfig) -> CandidateSampler:
    made = candidate_sampler(job, lambda item, weighted: item_table(job.data, item, weighted=weighted))
    assert made is not None
    return made


def reader_of(job: JobConfig, rank: int = 0, world: int = 1, size: int = 50, **options: Any) -> ClickReader:
    given = {"candidates": sampler_of(job), "shuffle": True, "shuffle_rows": 1000, "seed": SEED, **options}
    return open_reader(job.data, "train", fit_features(job.data), ReadOptions(size, rank, world, **given))


def by_row(batches: list[Batch]) -> dict[int, tuple[int, ...]]:
    """The candidates of each sample by its number."""
    found = {}
    for batch in batches:
        values, offsets = batch.tensors["item"]
        for at, row in enumerate(batch.dense[:, 0].int().tolist()):
            found[row] = tuple(values[offsets[at] : offsets[at + 1]].tolist())
    return found


def test_draws_are_the_same_for_any_workers_batches_and_points_of_resume(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    alone = reader_of(job)
    first, second = by_row(list(alone)), by_row(list(alone))
    assert set(first) == set(range(ROWS))
    assert all(len(candidates) == NEGATIVES + 1 for candidates in first.values())
    assert first != second, "another epoch draws others"
    items = pa.parquet.read_table(tmp_path / "train.parquet")["item"].to_numpy()
    keys = keys_of()
    assert all(candidates[0] == keys[items[row]] for row, candidates in first.items()), "the sample's own item is first"
    for world, size in ((2, 64), (3, 17)):
        batches = [batch for rank in range(world) for batch in reader_of(job, rank, world, size)]
        assert by_row(batches) == first, (world, size)
    readers = [reader_of(job, rank, 2, 64) for rank in range(2)]
    done: list[Batch] = []
    for reader in readers:
        steps = iter(reader)
        done += [next(steps) for _ in range(5)]
    states = [reader.state_dict() for reader in readers]
    others = [reader_of(job, rank, 3, 40) for rank in range(3)]
    for reader in others:
        reader.load_state_dicts(states)
    left = [batch for reader in others for batch in reader]
    assert len(by_row(done)) + len(by_row(left)) == ROWS
    assert {**by_row(done), **by_row(left)} == first, "a run that goes on draws as one that was never interrupted"
    assert by_row(list(others[0])).items() <= second.items(), "and in the next epoch too"


@pytest.mark.parametrize("kind", ["uniform", "popularity"])
def test_the_distribution_is_that_of_the_kind(tmp_path: Path, kind: str) -> None:
    job = job_of(tmp_path, kind)
    counts = np.bincount(pa.parquet.read_table(tmp_path / "train.parquet")["item"].to_numpy(), minlength=ITEMS)
    weights = counts if kind == "popularity" else np.ones(ITEMS)
    own, order = 7, np.argsort(keys_of())

    def draws(epoch: int) -> np.ndarray:
        """The numbers of the negatives of 20,000 samples."""
        made = sampler_of(job).draw(np.full(20_000, keys_of()[own]), np.arange(20_000), epoch)
        negatives = made.values.reshape(-1, NEGATIVES + 1)[:, 1:]
        return order[np.searchsorted(keys_of()[order], negatives)]

    table, later = draws(1), draws(2)
    drawn = np.bincount(table.ravel(), minlength=ITEMS)
    assert drawn[own] == 0, "a sample's own item is no negative of it"
    expected = weights * (np.arange(ITEMS) != own)
    expected = expected / expected.sum() * drawn.sum()
    others = expected > 0
    chi_square = float(((drawn - expected)[others] ** 2 / expected[others]).sum())
    freedom = others.sum() - 1
    print(f"seed {SEED}: chi-square {chi_square:.1f} at {freedom} degrees of freedom")
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom), "5 standard deviations above its mean"
    # Draws of one sample, of neighbouring samples and of neighbouring epochs are independent of each other.
    for one, other in ((table[:, 0], table[:, 1]), (table[:-1, 0], table[1:, 0]), (table[:, 0], later[:, 0])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(len(one))


def test_a_vocabulary_is_drawn_from_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("\n".join(str(item) for item in range(30)))
    features = {"item": {"kind": "id", "vocabulary": str(tmp_path / "items.txt")}, "row": {"kind": "dense"}}
    sampler = sampler_of(job_of(tmp_path, "uniform", features=features))
    drawn = sampler.draw(np.ones(2000, np.int64), np.arange(2000), 0).values.reshape(2000, -1)[:, 1:]
    assert set(drawn.ravel()) == set(range(2, 31)), "10 lines are in no training sample; the unknown row is no line"
    popular = sampler_of(job_of(tmp_path, "popularity", features=features))
    drawn = popular.draw(np.ones(2000, np.int64), np.arange(2000), 0).values
    assert set(drawn) == set(range(1, ITEMS + 1)), "the key of an unknown token is 0"


def test_a_table_leaves_out_the_own_item_exactly() -> None:
    table = ItemTable.of(np.array([2, 5, 9]), np.array([1, 3, 2]))
    numbers = (np.arange(60)[None, :] + 0.5) / 60
    for own, expected in ((2, {5: 36, 9: 24}), (5, {2: 20, 9: 40}), (9, {2: 15, 5: 45}), (7, {2: 10, 5: 30, 9: 20})):
        drawn = table.draw(np.array([own]), numbers)
        keys, counts = np.unique(drawn.values[1:], return_counts=True)
        assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected
    alone = ItemTable.of(np.array([5])).draw(np.array([5, 6]), np.full((2, 2), 0.9))
    assert (alone.values.tolist(), alone.offsets.tolist()) == ([5, 6, 5, 5], [0, 1, 4]), "there is no other item"
    assert ItemTable.of(np.empty(0, np.int64)).draw(np.array([5]), np.zeros((1, 2))).values.tolist() == [5]


def test_keys_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparserow.worker.data.candidates._PENDING", 100)
    draw, counter = np.random.default_rng(SEED), ItemCounter()
    keys = draw.integers(-5, 40, 1000)
    for part in np.split(keys, 20):
        counter.add(part)
    table = counter.table(weighted=True)
    wanted, counts = np.unique(keys, return_counts=True)
    assert table.keys.tolist() == wanted.tolist()
    assert np.diff(table.ends, prepend=0).tolist() == counts.tolist()
    assert np.diff(counter.table(weighted=False).ends, prepend=0).tolist() == [1] * len(wanted)


def test_in_batch_draws_the_items_of_the_batch(tmp_path: Path) -> None:
    reader = reader_of(job_of(tmp_path, "in_batch"), size=8)
    again = reader_of(job_of(tmp_path, "in_batch"), size=8)
    for batch, same in zip(reader, again, strict=True):
        values, offsets = batch.tensors["item"]
        assert torch.equal(values, same.tensors["item"][0]), "batches are a function of (seed, epoch, workers)"
        own = values[offsets[:-1]]
        assert set(values.tolist()) == set(own.tolist())
        for at in range(len(batch)):
            candidates = values[offsets[at] : offsets[at + 1]]
            assert (candidates[1:] != candidates[0]).all()
    sampler = CandidateSampler("item", "in_batch", 2, SEED)
    assert sampler.draw(np.array([3, 3]), np.arange(2), 0).values.tolist() == [3, 3], "no other item is in the batch"


def test_evaluations_draw_the_same_in_every_epoch(tmp_path: Path) -> None:
    readers = open_readers(job_of(tmp_path), WorkerGroup())
    first, second = ([batch.micro_batches[0].tensors["item"][0] for batch in readers.test] for _ in range(2))
    assert torch.equal(first[0], second[0])
    order = {"shuffle": False, "candidates": sampler_of(job_of(tmp_path))}
    trained = next(iter(reader_of(job_of(tmp_path), size=8192, **order))).tensors["item"][0]
    assert not torch.equal(first[0], trained), "they are not the draws of a training epoch"


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ("popularity", "uniform", "reader state: negatives was '4 popularity for item, seed 11 of 20 items"),
        ("popularity", None, "reader state: negatives was '4 popularity .*; this reader has None"),
        (None, "in_batch", "reader state: negatives was None; this reader has '4 in_batch for item, seed 11'"),
    ],
)
def test_a_position_with_other_negatives_is_refused(
    tmp_path: Path, saved: str | None, now: str | None, message: str
) -> None:
    readers = [
        reader_of(job_of(tmp_path, kind or "uniform"), **({} if kind else {"candidates": None}))
        for kind in (saved, now)
    ]
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        readers[1].load_state_dict(readers[0].state_dict())


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"loss": "bce"}, r"tasks\.next\.negatives: is not possible with loss bce; allowed: softmax, bpr"),
        ({"item": None}, r"tasks\.next\.item: is missing; tasks\.next\.negatives needs the item of a sample"),
        ({"item": "row"}, r"tasks\.next\.item: 'row' is not allowed; allowed: a feature of kind id: item"),
        ({"negatives": None}, r"tasks\.next\.item: has no effect with loss softmax without negatives"),
        ({"negatives": {"kind": "unform", "per_positive": 1}}, r"tasks\.next\.negatives\.kind"),
        ({"negatives": {"kind": "uniform", "per_positive": 0}}, r"tasks\.next\.negatives\.per_positive"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(tmp_path: Path, task: dict[str, Any], message: str) -> None:
    document = job_of(tmp_path).model_dump(mode="json", exclude_unset=True, by_alias=True)
    document["tasks"]["next"] |= task
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        validate(JobConfig, document)


def test_a_second_task_cannot_draw_or_read_the_item(tmp_path: Path) -> None:
    document = job_of(tmp_path).model_dump(mode="json", exclude_unset=True, by_alias=True)
    tasks = document["tasks"]
    with pytest.raises(sr.errors.InvalidArgument, match=r"tasks\.other\.negatives: tasks\.next has negatives too"):
        validate(JobConfig, {**document, "tasks": {**tasks, "other": tasks["next"]}})
    reads = {"loss": "in_batch_softmax", "item": "item"}
    with pytest.raises(sr.errors.InvalidArgument, match=r"tasks\.other\.item: 'item' becomes a list of candidates"):
        validate(JobConfig, {**document, "tasks": {**tasks, "other": reads}})


def test_training_files_with_one_item_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, features={"item": {"kind": "id", "modulo": 1}, "row": {"kind": "dense"}})
    with pytest.raises(sr.errors.InvalidArgument, match=r"negatives: feature 'item' has 1 different keys"):
        sampler_of(job)


@pytest.mark.parametrize("loss", ["softmax", "bpr"])
def test_a_reward_weighs_the_loss_of_the_first_candidate(loss: str) -> None:
    task = Task("next", "click", loss, item="item", negatives=NegativesConfig(kind="uniform", per_positive=2))
    outputs, draw = TaskOutputs([task]), np.random.default_rng(SEED)
    logits = draw.normal(size=(4, 5)).astype(np.float32)
    rewards, weights = np.array([1.0, 0.0, 2.0, 1.0]), np.array([1.0, 5.0, 1.0, 0.5])
    part = NamedPart({}, torch.tensor(rewards, dtype=torch.float32), weights=torch.tensor(weights, dtype=torch.float32))
    found = outputs.loss(outputs.of(torch.from_numpy(logits), 4), part)
    x = logits[:, :3].astype(np.float64)
    if loss == "softmax":
        each = np.log(np.exp(x).sum(axis=1)) - x[:, 0]
    else:
        each = np.log1p(np.exp(x[:, 1:] - x[:, :1])).mean(axis=1)
    assert float(found) == pytest.approx(float((rewards * weights * each).sum() / 4), rel=1e-6)
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"tasks\.next\.negatives: forward returned \(4, 2\) for 4 samples of 3"
    ):
        outputs.of(torch.zeros(4, 2), 4)
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"tasks\.next: labels: -1\.0 of sample 0 .*; allowed: finite numbers >= 0"
    ):
        outputs.check(Batch(torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.int64), torch.tensor([-1.0])))


class First(torch.nn.Module):
    """Gives the candidates' keys as logits."""

    def forward(self, **tensors: Any) -> torch.Tensor:
        values, offsets = tensors["item"]
        return values.view(offsets.shape[0] - 1, -1).float()


def test_only_samples_with_a_reward_are_evaluated(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    readers = open_readers(job, WorkerGroup())
    found = evaluate(First(), readers.test, WorkerGroup(), TaskOutputs(job.all_tasks), job.metrics)
    (batch,) = list(readers.test)
    part = batch.micro_batches[0]
    candidates = part.tensors["item"][0].view(ROWS, -1).numpy()[part.labels.numpy() > 0]
    ranks = 1 + (candidates[:, 1:] >= candidates[:, :1]).sum(axis=1)
    assert found.metrics["next.mrr"] == pytest.approx(float((1 / ranks).mean()))
