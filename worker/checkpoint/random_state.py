"""The random numbers of a process: torch on every device, numpy's and Python's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Where all generators stand."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss)),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Puts all generators where :func:`random_state` found them; GPUs as far as there are as many."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
