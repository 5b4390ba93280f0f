"""A training job whose every sample has a row of its own, so that the rows tell how often it was trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from checkpoint_rows import rows_of_checkpoint
from sparserow.proto.row_keys import hash_key
from sparserow_process import Launcher

SAMPLES, TEST_SAMPLES, VALUES, ROWS = 4000, 1000, 20, 2**44
LEASE_ROWS = 200


def write_csv(path: Path, first: int, count: int) -> None:
    """Each sample has an id of its own, and a value that tells its label nine times of ten."""
    draw = np.random.default_rng(first)
    values = draw.integers(0, VALUES, count)
    labels = (values % 2) ^ (draw.random(count) < 0.1)
    lines = [
        f"{first + index},{value},{label}" for index, (value, label) in enumerate(zip(values, labels, strict=True))
    ]
    path.write_text("\n".join(lines) + "\n")


def write_job(folder: Path) -> Path:
    """A job whose workers come and go, and its data; returns the job's file."""
    for name, first, count in (("train", 0, SAMPLES), ("test", SAMPLES, TEST_SAMPLES)):
        write_csv(folder / f"{name}.csv", first, count)
    text = f"""
name: elastic
data:
  format: csv
  train: {folder / "train.csv"}
  test: {folder / "test.csv"}
  csv: {{columns: [id, value, label], label: label}}
features: {{id: {{kind: id}}, value: {{kind: id}}}}
model: {{class: DeepFM, args: {{rows: {{'*': {ROWS}}}, dim: 4, hidden: [8]}}, min_rows: 1}}
train:
  epochs: 2
  batch_size: 20
  workers: 2
  staleness: 8
  dense: ps
  threads: 1
  elastic: {{lease_rows: {LEASE_ROWS}}}
  dense_optimizer: {{kind: adam, lr: 0.01}}
  row_optimizer: {{kind: adagrad, lr: 0.1}}
"""
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def updates(launcher: Launcher, address: str, folder: Path) -> dict[int, int]:
    """How often each sample was trained on: as many commits as its row has had."""
    assert launcher.start("checkpoint", "save", str(folder), f"--coordinator={address}").end() == 0
    (rows,) = (rows for table, rows in rows_of_checkpoint(folder).items() if table.endswith(".id"))
    sample_of = {hash_key(str(sample)) % ROWS: sample for sample in range(SAMPLES)}
    return {sample_of[key]: count for key, (_, count, *_) in rows.items()}
