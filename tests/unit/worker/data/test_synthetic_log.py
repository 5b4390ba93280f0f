"""The synthetic click log: deterministic, in Criteo's form, with a signal."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config
from sparserow.worker.data import ReadOptions, write_click_log
from sparserow.worker.data.sources import fit_features, open_reader


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    logs = []
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        (tmp_path / name).mkdir()
        logs.append(write_click_log(tmp_path / name, rows=2000, test_rows=500, seed=seed))
    assert logs[0].train.read_bytes() == logs[1].train.read_bytes() != logs[2].train.read_bytes()
    assert logs[0].test.read_bytes() == logs[1].test.read_bytes()
    assert logs[0].bayes_auc == logs[1].bayes_auc != logs[2].bayes_auc


def test_the_planted_signal_and_the_reader_agree(tmp_path):
    log = write_click_log(tmp_path, rows=30_000, test_rows=20_000, seed=0)
    assert log.bayes_auc > 0.80
    assert 0.15 < log.click_rate < 0.45
    entropy = -(log.click_rate * np.log(log.click_rate) + (1 - log.click_rate) * np.log(1 - log.click_rate))
    assert log.bayes_log_loss < 0.9 * entropy
    config = load_config(DataConfig, None, [f"train={log.train}", f"test={log.test}"])
    batches = list(open_reader(config, "train", fit_features(config), ReadOptions(batch_size=8192)))
    assert sum(map(len, batches)) == 30_000
    keys = np.concatenate([batch.sparse.numpy() for batch in batches])
    counts = np.sort(np.unique(keys[:, 2], return_counts=True)[1])[::-1]
    assert len(counts) > 4000  # a long tail ...
    assert counts[1] > 30 * np.median(counts)  # ... behind a head (the first may be the missing value)
    assert len(np.unique(keys[:, 8])) == 4  # three values, or missing
    assert any((batch.dense == 0).any() for batch in batches)


def test_compressed_log_holds_the_same_lines(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    plain = write_click_log(tmp_path / "plain", rows=500, test_rows=10, seed=1)
    packed = write_click_log(tmp_path / "packed", rows=500, test_rows=10, seed=1, compress=True)
    assert packed.train.suffix == ".gz"
    assert gzip.decompress(packed.train.read_bytes()) == plain.train.read_bytes()


@pytest.mark.parametrize(("field", "value"), [("rows", 0), ("test_rows", 0), ("seed", -1)])
def test_bad_arguments(tmp_path, field, value):
    with pytest.raises(InvalidArgument, match=f"write_click_log.{field}: {value} is not allowed"):
        write_click_log(tmp_path, **{"rows": 10, field: value})
