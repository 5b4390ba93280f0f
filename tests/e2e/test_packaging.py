"""A wheel works in an empty environment, and a checkout works in a folder whose name is no identifier."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import sparserow
from checkout import tracked_files

pytestmark = pytest.mark.started

ROOT = Path(__file__).resolve().parents[2]
TINY_TRAINING = """
import torch, sparserow as sr
from pathlib import Path

assert Path(sr.__file__).resolve().is_relative_to({folder!r}), sr.__file__
with sr.local_cluster(shards=2) as cluster:
    session = sr.connect(cluster.address, namespace="wheel", staleness=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50_000, 8), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    model = session.distribute(model, optimizer=sr.optim.SGD(lr=0.5), min_rows=10_000)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(256).reshape(256, 1)
    losses = []
    for _ in range(20):
        dense.zero_grad()
        loss = ((model(ids) - 1.0) ** 2).mean()
        loss.backward()
        session.step(dense)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    rows = session.table("0").pull(ids.numpy().ravel())
    assert rows.shape == (256, 8)
print("trained", losses[0], "->", losses[-1])
"""


def run(*command: str | Path, cwd: Path, timeout_sec: float, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_sec,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copy_checkout(target: Path) -> None:
    """Copies what git tracks and what the build made beside it, with times kept, so that nothing is built again."""
    built = [*(ROOT / "cpp_ext").glob("*.so"), *(ROOT / "proto").glob("*_pb2*")]
    for name in [*tracked_files(), *(str(path.relative_to(ROOT)) for path in built)]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def train(tmp_path: Path, python: Path, folder: Path) -> None:
    """Trains outside the checkout, with the package that is in ``folder``: commands, extension modules and the ops."""
    script = tmp_path / "train.py"
    script.write_text(TINY_TRAINING.format(folder=str(folder.resolve())))
    assert "trained" in run(python, script, cwd=tmp_path, timeout_sec=600)


def test_wheel_trains_from_outside_the_checkout(tmp_path: Path, empty_environment: Path) -> None:
    source = tmp_path / "source"
    copy_checkout(source)
    wheels = tmp_path / "wheels"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source, cwd=tmp_path, timeout_sec=900)
    (wheel,) = wheels.glob("sparserow-*.whl")
    names = ZipFile(wheel).namelist()
    assert any(name.startswith("sparserow/cpp_ext/_server.") and name.endswith(".so") for name in names)
    sources = {path.name for path in (source / "ps_server/coordinator/page").iterdir() if path.suffix != ".py"}
    page = "sparserow/ps_server/coordinator/page/"
    assert {name.removeprefix(page) for name in names if name.startswith(page) and not name.endswith(".py")} == {
        each for each in sources if each.endswith((".html", ".css", ".js"))
    }
    alone = ("sparserow/cpp_ext/_bench", "sparserow/deploy/bench/", "sparserow/deploy/package/", "sparserow/tests/")
    assert [name for name in names if name.startswith(alone)] == []
    assert wheel.name.startswith(f"sparserow-{sparserow.__version__}-")
    run(*pip, "--python", empty_environment, "install", "-q", "--no-deps", wheel, cwd=tmp_path, timeout_sec=300)
    train(tmp_path, empty_environment, empty_environment.parents[1])
    command = empty_environment.parent / "sparserow"
    assert "coordinator" in run(command, "--help", cwd=tmp_path, timeout_sec=300)
    told = run(command, "--version", cwd=tmp_path, timeout_sec=300).splitlines()
    assert told[0] == f"sparserow {sparserow.__version__}"
    assert [line.partition(":")[0] for line in told[1:]] == ["core", "torch", "RocksDB", "OpenSSL"]
    bench = subprocess.run([command, "bench", "engine"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert bench.returncode == 1
    (line,) = bench.stderr.splitlines()
    assert "benchmarks run in a checkout" in line


def test_a_checkout_trains_in_a_folder_that_is_no_identifier(tmp_path: Path, empty_environment: Path) -> None:
    checkout = tmp_path / "a-b"
    copy_checkout(checkout)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", empty_environment)
    run(*pip, "install", "-q", "--no-deps", "--no-build-isolation", "-e", checkout, cwd=tmp_path, timeout_sec=300)
    train(tmp_path, empty_environment, checkout)
