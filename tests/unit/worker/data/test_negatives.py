"""Down-sampled negatives: which samples are left out, and the correction of what is learnt from the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import validate
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.negatives import NegativeSampling
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow.worker.training.exported_model import CorrectedLogits
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence

ROWS, KEEP = 6_000, 0.25


def job_of(folder: Path, transform: str = "none", **data: object) -> JobConfig:
    draw = np.random.default_rng(5)
    for name in ("train", "test"):
        # 10 items: a click has the probability 0.02 to 0.38.
        items = draw.integers(0, 10, ROWS)
        clicks = draw.random(ROWS) < 0.02 + 0.04 * items
        table = pa.table({"click": clicks.astype(np.int8), "row": np.arange(ROWS, dtype=np.float32), "item": items})
        pa.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=700)
    columns, scale = {"label": "click"}, "standardize" if transform == "standardize" else "none"
    features = {"row": {"kind": "dense", "scale": scale}, "item": {"kind": "id"}}
    return validate(
        JobConfig,
        {
            "data": {
                "format": "parquet",
                "train": str(folder / "train.parquet"),
                "test": str(folder / "test.parquet"),
                "columns": columns,
                **data,
            },
            "features": features,
            "model": {
                "class": "DLRM",
                "backend": "local",
                "args": {"rows": {"*": 1000}, "dim": 4, "bottom": [4], "top": [4]},
                "min_rows": 1,
            },
            "train": {
                "batch_size": 200,
                "epochs": 4,
                "dense_optimizer": {"kind": "adam", "lr": 0.01},
                "row_optimizer": {"kind": "adagrad", "lr": 0.05},
            },
        },
    )


def rows_of(job: JobConfig, world: int, epochs: int = 1) -> list[list[float]]:
    """The rows that the workers together read in each epoch, sorted."""
    fitted = fit_features(job.data)
    options = [
        ReadOptions(50, rank, world, shuffle=True, shuffle_rows=1000, seed=3, negatives=NegativeSampling(KEEP, 3))
        for rank in range(world)
    ]
    readers = [open_reader(job.data, "train", fitted, each) for each in options]
    return [
        sorted(row for reader in readers for batch in reader for row in batch.dense[:, 0].tolist())
        for _ in range(epochs)
    ]


def test_all_positives_and_a_share_of_the_negatives_are_read(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    first, second = rows_of(job, 1, epochs=2)
    clicks = pa.parquet.read_table(tmp_path / "train.parquet")["click"].to_numpy()
    negatives = int((clicks == 0).sum())
    for rows in (first, second):
        assert len(rows) == len(set(rows))
        assert set(np.flatnonzero(clicks)) <= set(rows)
        kept = len(rows) - int(clicks.sum())
        assert abs(kept - KEEP * negatives) < 5 * np.sqrt(negatives * KEEP * (1 - KEEP)), "5 standard deviations"
    assert first != second, "each epoch leaves out others"
    assert rows_of(job, 3) == [first], "the choice does not depend on the number of workers"


def test_a_model_of_fewer_negatives_predicts_the_rate_of_all(tmp_path: Path) -> None:
    losses = []
    for keep in (1.0, KEEP):
        job = job_of(tmp_path, "standardize", negatives_keep=keep)
        trainer = Trainer(job, group=WorkerGroup(), backend=LocalBackend(job.train), observer=Silence())
        result = trainer.run()
        losses.append(result.test_log_loss)
        program = trainer.exported(trainer.model_on_host()).model.eval()
        batch = next(iter(open_reader(job.data, "test", fit_features(job.data), ReadOptions(ROWS, in_order=False))))
        with torch.no_grad():
            rate = float(torch.sigmoid(program(batch.tensors["row"], batch.tensors["item"])).mean())
        assert rate == pytest.approx(float(batch.labels.mean()), abs=0.03)
    assert losses[1] == pytest.approx(losses[0], abs=0.01)


@pytest.mark.parametrize(("saved", "now"), [(KEEP, None), (None, KEEP), (KEEP, 0.5)])
def test_a_position_with_another_share_is_refused(tmp_path: Path, saved: float | None, now: float | None) -> None:
    job = job_of(tmp_path)
    readers = [
        open_reader(
            job.data,
            "train",
            fit_features(job.data),
            ReadOptions(50, shuffle=True, seed=3, negatives=None if keep is None else NegativeSampling(keep, 3)),
        )
        for keep in (saved, now)
    ]
    with pytest.raises(
        sr.errors.InvalidArgument, match=f"reader state: negatives_keep was {saved}; this reader has {now}"
    ):
        readers[1].load_state_dict(readers[0].state_dict())


class ByName(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"click": x}


def test_logits_of_several_outputs_are_corrected() -> None:
    corrected = CorrectedLogits(ByName(), 0.5)
    assert corrected(torch.zeros(2))["click"].tolist() == pytest.approx([np.log(0.5)] * 2)


def test_it_needs_one_task_with_binary_cross_entropy(tmp_path: Path) -> None:
    job = job_of(tmp_path).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(sr.errors.InvalidArgument, match=r"data\.negatives_keep: needs a single task with loss bce"):
        validate(JobConfig, {**job, "data": {**job["data"], "negatives_keep": 0.5}, "tasks": {"x": {"loss": "mse"}}})
