"""Readers whose place can be saved, and those whose place cannot."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import sparserow as sr
from sparserow.worker.checkpoint.save import stateful


def test_a_reader_without_a_place_is_refused_by_name() -> None:
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"save\.reader: DataLoader has no state_dict .* StatefulDataLoader"
    ):
        stateful(DataLoader([1, 2]), "save.reader")
    assert stateful(StatefulDataLoader([1, 2]), "save.reader").state_dict()
