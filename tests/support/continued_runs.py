"""Runs over parts of a click log, each of which begins with what the one before has learnt."""

from __future__ import annotations

from pathlib import Path

from checkpoint_rows import rows_of_checkpoint
from sparserow.worker.data import write_click_log

JOB = Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "criteo.yaml"
BATCH, STEPS = 64, 12


def write_parts(folder: Path, paths: list[Path]) -> Path:
    """Writes a click log as files of whole batches; returns its test file."""
    log = write_click_log(folder, rows=len(paths) * STEPS * BATCH, test_rows=1500, seed=3)
    lines = Path(log.train).read_bytes().splitlines(keepends=True)
    assert len(lines) == len(paths) * STEPS * BATCH
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines[number * STEPS * BATCH : (number + 1) * STEPS * BATCH]))
    return Path(log.test)


def arguments(data: list[str], url: Path, result: Path, *sets: str) -> list[str]:
    """The words of a command that trains in the order of the files, and saves every four steps."""
    settings = [
        *data,
        "data.shuffle_rows=0",
        "model.args.rows={'*': 3000}",
        "model.min_rows=1",
        f"train.batch_size={BATCH}",
        "train.threads=1",
        "train.schedule={kind: step, every_steps: 7, factor: 0.9}",
        "cluster.slot_count=256",
        f"train.checkpoint={{url: '{url}', every_steps: 4}}",
        *sets,
    ]
    return ["train", str(JOB), "--json", str(result), *(f"--set={each}" for each in settings)]


def learnt(url: Path) -> dict[str, dict[int, tuple]]:
    """Update counts, weights and state of all rows; versions are those of a cluster."""
    return {
        table: {key: row[1:] for key, row in rows.items()} for table, rows in rows_of_checkpoint(url).items() if rows
    }
