"""A job that reads a stream, whose rows are counters: the value of a key's row is the number of its events."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint_rows import rows_of_checkpoint
from sparserow.proto.control import ControlClient
from sparserow.proto.row_keys import hash_key
from sparserow_process import Launcher

# The logit of each event is 0, whatever its row, and its gradient -1, whatever the weight of its loss.
MODEL = """
import torch
from torch import nn


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return torch.zeros_like(values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.sign()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(2**40, 1, device="meta")
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, item):
        return Counted.apply(self.rows(item % 2**40).squeeze(-1)) + self.bias * 0.0
"""


def zipf_events(count: int, seed: int, keys: int = 2000) -> list[bytes]:
    """JSON of events whose items are drawn by Zipf's law; each label is 1."""
    items = np.random.default_rng(seed).zipf(1.3, count) % keys
    return [json.dumps({"item": f"i{item}", "click": 1}).encode() for item in items.tolist()]


def counts_of(events: Iterable[bytes]) -> dict[str, int]:
    """The number of events of each item."""
    return dict(Counter(json.loads(event)["item"] for event in events))


def write_stream_job(folder: Path, stream: dict[str, Any], train: dict[str, Any] | None = None) -> Path:
    """A job of two workers that counts; returns its file.

    Args:
        folder: where its files are written.
        stream: the section of its source.
        train: how its workers meet; None: they come and go.
    """
    (folder / "counting.py").write_text(MODEL)
    (folder / "like.jsonl").write_bytes(b"\n".join(zipf_events(50, 0)) + b"\n")
    job = {
        "name": "counting",
        "data": {
            "format": "jsonl",
            "stream": {"like": str(folder / "like.jsonl"), "max_wait": "20ms", **stream},
            "test": str(folder / "like.jsonl"),
            "columns": {"label": "click"},
            "on_bad_line": "skip",
        },
        "features": {"item": {"kind": "id"}},
        "model": {"class": "counting:Counting", "min_rows": 1},
        "tables": {"*": {"init": {"kind": "constant", "value": 0.0}}},
        "publish": {"local": None},
        "train": {
            "batch_size": 64,
            "workers": 2,
            "threads": 1,
            "grad_scale": "sum",
            "row_optimizer": {"kind": "sgd", "lr": 1.0},
            **(train or {"staleness": None, "dense": "ps", "elastic": {"max_restarts": 100}}),
        },
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def steps_of(address: str) -> int:
    """The highest step of the job; -1: it has none."""
    with ControlClient(address) as control:
        return max((job.highest_step for job in control.status().jobs if job.name == "counting"), default=-1)


def counters(launcher: Launcher, address: str, folder: Path, items: Iterable[str]) -> dict[str, int]:
    """The value of each item's row; items without one are left out."""
    assert launcher.start("checkpoint", "save", str(folder), f"--coordinator={address}").end() == 0
    (rows,) = (rows for table, rows in rows_of_checkpoint(folder).items() if table == "counting/rows")
    item_of = {hash_key(item) % 2**40: item for item in items}
    found = {item_of[key]: struct.unpack("<f", weights)[0] for key, (_, _, weights, _) in rows.items()}
    assert all(value == int(value) for value in found.values())
    return {item: int(value) for item, value in found.items()}
