"""A worker whose training loop raises; run as ``failing_worker.py COORDINATOR RANK WORLD_SIZE``."""

from __future__ import annotations

import sys

import sparserow as sr


def train_on(sample: str) -> float:
    """What a loop does with a sample that is broken."""
    return float(sample)


def main() -> None:
    """Joins the job, and fails."""
    coordinator, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with sr.connect(coordinator, "ads", job="ctr", rank=rank, world_size=world_size, staleness=None):
        train_on("s3://user:password@bucket/part-7")


if __name__ == "__main__":
    main()
