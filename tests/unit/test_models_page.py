"""The examples of docs/models.md make the models that they name, and the page names every model."""

from __future__ import annotations

import inspect

import pytest
import torch
import yaml
from torch import nn

from doc_blocks import ROOT, doc_blocks
from sparserow.worker import models
from sparserow.worker.metrics.losses import LOSSES

PARTS = {"DLRM", "DeepFM", "FeatureEmbeddings", "HashedEmbeddings", "Tower"}  # of models, or models of matrices
JOBS = [yaml.safe_load(each.text) for each in doc_blocks() if each.page == "docs/models.md" and each.language == "yaml"]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["model"]["class"])
def test_an_example_makes_its_model(job):
    with torch.device("meta"):  # the tables have millions of rows
        model = getattr(models, job["model"]["class"])(**job["model"]["args"])
    assert isinstance(model, nn.Module)
    assert all(task["loss"] in LOSSES for task in job.get("tasks", {}).values())


def test_the_page_has_every_model_and_every_loss():
    classes = {name for name in models.__all__ if inspect.isclass(getattr(models, name))}
    assert {job["model"]["class"] for job in JOBS} == classes - PARTS
    rows = {line.split("`")[1] for line in (ROOT / "docs" / "models.md").read_text().splitlines() if line[:3] == "| `"}
    assert classes - PARTS | set(LOSSES) <= rows
