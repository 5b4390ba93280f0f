"""Saves and restores the random number generators of a process: torch's on every device, numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Returns the states of all generators."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss)),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Sets all generators to the states from :func:`random_state`; those of GPUs only if their number is the same."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
