"""Epochs of leased data that worker 0 could not test."""

from __future__ import annotations

import math
from dataclasses import replace

from sparserow.ps_server.coordinator.state.epoch_records import EpochRecords, EpochTest, Sums
from sparserow.worker.data.leased import EpochScore, Leased, Trained
from sparserow.worker.training import leased_epochs


class Reader:
    """A leased reader at the end of epoch 3, with the coordinator's records."""

    def __init__(self, records: EpochRecords) -> None:
        self.records, self.came_late = records, True

    @property
    def end(self) -> Leased:
        record = self.records.get(3)
        tested = None if record.tested is None else EpochScore(*vars(record.tested).values())
        return Leased(None, 0, True, 4, Trained(*vars(record.trained).values()), tested)

    def report_tested(self, tested: EpochScore) -> None:
        self.records.test(3, EpochTest(*vars(tested).values()))


def test_an_epoch_without_a_test_is_told_once_with_the_same_figures() -> None:
    records = EpochRecords()
    records.train(3, Sums(4000, 4000, 1200.0, 2.0))
    reader = Reader(records)
    first = leased_epochs.known_result(reader, 3, 2, "click")
    assert first is not None
    assert not leased_epochs.was_tested(reader)
    leased_epochs.keep_untested(reader, first)
    again = Reader(EpochRecords.of_document(records.to_document()))  # a restarted coordinator has it as well
    assert leased_epochs.was_tested(again)
    known = leased_epochs.known_result(again, 3, 1, "click")
    assert known is not None
    assert math.isnan(known.test_auc)
    assert replace(known, test_auc=0.0, test_log_loss=0.0) == replace(first, test_auc=0.0, test_log_loss=0.0)
