"""The examples of docs/models.md make the models that they name, and the page names every model."""

from __future__ import annotations

import inspect

import torch
import yaml
from torch import nn

from doc_blocks import ROOT, doc_blocks
from sparserow.worker import models
from sparserow.worker.metrics.losses import LOSSES

PARTS = {"FeatureEmbeddings", "Tower"}  # of models
JOBS = [yaml.safe_load(each.text) for each in doc_blocks() if each.page == "docs/models.md" and each.language == "yaml"]


def test_an_example_makes_its_model():
    wrong = []
    for job in JOBS:
        name = job["model"]["class"]
        try:
            with torch.device("meta"):  # the tables have millions of rows
                model = getattr(models, name)(**job["model"]["args"])
        except Exception as error:  # of any kind: each example is told with what is wrong in it
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if not isinstance(model, nn.Module):
            wrong.append(f"{name} is no model")
        losses = [task["loss"] for task in job.get("tasks", {}).values()]
        wrong += [f"{name}: there is no loss {loss}" for loss in losses if loss not in LOSSES]
    assert JOBS
    assert not wrong, "\n".join(wrong)


def test_the_page_has_every_model_and_every_loss():
    classes = {name for name in models.__all__ if inspect.isclass(getattr(models, name))}
    wrong = {job["model"]["class"] for job in JOBS} ^ (classes - PARTS)
    assert not wrong, f"without an example, or without a class: {', '.join(sorted(wrong))}"
    rows = {line.split("`")[1] for line in (ROOT / "docs" / "models.md").read_text().splitlines() if line[:3] == "| `"}
    missing = (classes - PARTS | set(LOSSES)) - rows
    assert not missing, f"not in the tables of docs/models.md: {', '.join(sorted(missing))}"
