"""``bench gpu`` on a device that counts what crosses: each figure comes from a run; times judge nothing here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparserow.deploy.bench import gpu
from sparserow.deploy.bench.counting_device import device
from sparserow.deploy.cli import main


def test_each_part_is_measured() -> None:
    figures = {
        figure.metric.rpartition(": ")[2]: figure
        for figure in gpu.run_on(replace(gpu.QUICK, rows=3000, batch=64, repetitions=10), device())
    }
    assert figures["copies to the device"].passes
    assert figures["to the device"].value > figures["to the host"].value > 0
    assert figures["rows on a shard, of torch"].value > 0
    assert figures["tables on the device, of torch"].value > 0
    assert figures["step, of the longer part"].ratio > 0
    assert figures["tables on the device, of one matrix in torch"].ratio > 0
    assert figures["rows kept, p50"].value > 0
    assert figures["rows kept, of one matrix"].ratio > 0
    assert figures["ids that were not kept"].value == 0
    assert not any("busy" in name for name in figures)  # torch's profiler knows CUDA alone


def test_without_cuda_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "gpu", "--quick"])
    assert ended.value.code != 0
    assert "finds no CUDA device" in capsys.readouterr().err
