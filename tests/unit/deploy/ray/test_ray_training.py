"""What a node of Ray says of a job's data before it trains, without Ray."""

from __future__ import annotations

from pathlib import Path

from sparserow.deploy.ray.training import problem_with_data
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import validate


def test_data_that_a_node_does_not_have_is_named(tmp_path: Path) -> None:
    data = {"format": "criteo", "train": f"{tmp_path}/log/*.tsv", "test": f"{tmp_path}/test.tsv"}
    job = validate(JobConfig, {"data": data, "model": {"class": "DLRM", "args": {"rows": {"*": 1_000_000}}}})
    assert f"data.train: {tmp_path}/log/*.tsv: no file has such a name" in str(problem_with_data(job))
    (tmp_path / "log").mkdir()
    line = "\t".join(["1", *["5"] * 13, *["ab"] * 26]) + "\n"
    (tmp_path / "log" / "1.tsv").write_text(line)
    assert f"{tmp_path}/test.tsv: No such file" in str(problem_with_data(job))
    (tmp_path / "test.tsv").write_text(line)
    assert problem_with_data(job) is None
