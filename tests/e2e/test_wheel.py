"""The wheel of ``make wheel`` in an empty environment, without the checkout: it trains, publishes and looks rows up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import venv
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

from doc_blocks import readme_first_block
from nested_make import outside_make

pytestmark = pytest.mark.started

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ("librocksdb", "libssl", "libcrypto", "libsnappy", "libzstd", "liblz4", "libbz2", "libgflags")
# What pip needs to find packages, where the machine's own settings do not say it.
OF_PIP = ("HOME", "PIP_", "SSL_CERT", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy", "HTTP", "NO_PROXY")
WITH_TLS_AND_SSD = """
import sys, tempfile
import {first}, {second}
import numpy as np, torch, sparserow as sr

sr.use_security("certificates/security.yaml")
ssd = dict(memory_budget="64MiB", ssd_path=tempfile.mkdtemp(dir="."), ssd_engine="rocksdb")
with sr.local_cluster(shards=2, **ssd) as cluster:
    session = sr.connect(cluster.address, namespace="ads", staleness=0)
    model = torch.nn.Sequential(torch.nn.Embedding(50_000, 8), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    model = session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.05))
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    ids = torch.arange(256).reshape(256, 1)
    losses = []
    for _ in range(20):
        loss = ((model(ids) - 1.0) ** 2).mean()
        loss.backward()
        session.step(dense)
        dense.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    session.publish("ctr", root="models", model=model.eval(), example=(ids,), alias="live")
    np.save("rows.npy", session.table("0").pull(ids.numpy().ravel()))
    session.close()
loaded = {{line.split()[-1] for line in open("/proc/self/maps") if "/" in line}}
for name in {bundled}:
    (path,) = {{each for each in loaded if f"/{{name}}-" in each}}
    assert path.startswith(sys.prefix), path
"""
SERVED = """
import sys, numpy as np, sparserow as sr

sr.use_security("certificates/security.yaml")
with sr.local_serving("ctr", root="models") as serving, sr.ServingClient(serving.addresses[0]) as client:
    rows, found = client.lookup("0", np.arange(256, dtype=np.uint64), deadline_ms=60_000)
assert found.all() and np.array_equal(rows, np.load("rows.npy"))
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the wheel, which is built anew."""
    subprocess.run(["make", "--no-print-directory", "wheel"], cwd=ROOT, env=outside_make(), check=True, timeout=1200)
    (built,) = (ROOT / "dist").glob("*.whl")
    return Path(shutil.copy2(built, tmp_path_factory.mktemp("wheel")))


class EmptyEnvironment:
    """An environment with nothing but pip, whose processes see neither the checkout nor a variable of this process.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        venv.create(folder / "environment", with_pip=True, symlinks=True)
        self.programs = folder / "environment" / "bin"
        unshare = shutil.which("unshare")
        hide = f'mount -t tmpfs none "{ROOT}" && cd "{self.work}" && exec "$@"'
        self._apart = (str(unshare), "--map-root-user", "--mount", "/bin/sh", "-c", f"PATH=/usr/bin:/bin; {hide}", "sh")
        probe = subprocess.run([*self._apart, "/bin/ls", ROOT], capture_output=True, text=True) if unshare else None
        if probe is None or probe.returncode != 0 or probe.stdout:
            pytest.skip("needs unshare, which hides the checkout")

    def run(self, name: str, *arguments: str | Path, **environment: str) -> str:
        """Runs a program of the environment and returns what it prints."""
        # The shell that hides the checkout needs a PATH of its own, and the program gets it back.
        path = ("/usr/bin/env", f"PATH={self.programs}")
        command = [*self._apart, *path, str(self.programs / name), *map(str, arguments)]
        done = subprocess.run(command, cwd=self.work, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{name} {arguments} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def pip(self, *arguments: str | Path) -> None:
        """Runs pip, which has what it needs to find packages."""
        self.run(
            "python",
            *("-m", "pip", "-q", "--disable-pip-version-check", *arguments),
            **{name: value for name, value in os.environ.items() if name.startswith(OF_PIP)},
        )


@pytest.mark.full("test_packaging.py installs a wheel beside the dependencies that development has")
def test_a_wheel_trains_publishes_and_serves_without_the_checkout(
    tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = EmptyEnvironment(tmp_path)
    packages, began = tmp_path / "packages", time.monotonic()
    environment.pip("download", "-d", packages, wheel, f"torch=={version('torch')}")
    downloaded = time.monotonic()
    environment.pip("install", "--no-index", "--find-links", packages, wheel)
    installed = time.monotonic()
    environment.run("python", "-m", "pip", "check")
    environment.run("sparserow", "security", "init", "certificates", "--host", "127.0.0.1")
    script, printed = readme_first_block()
    assert environment.run("python", "-c", script) == printed
    trained = time.monotonic()
    with capsys.disabled():
        print(
            f"\nwheel: {wheel.stat().st_size / (1 << 20):.1f} MiB; download {downloaded - began:.1f} s, "
            f"install {installed - downloaded:.1f} s, train and publish {trained - installed:.1f} s"
        )
    for first, second in (("torch", "sparserow"), ("sparserow", "torch")):
        shutil.rmtree(environment.work / "models")
        block = WITH_TLS_AND_SSD.format(first=first, second=second, bundled=BUNDLED)
        environment.run("python", "-c", block)
    assert f"{version('torch')} is installed" in environment.run("sparserow", "--version")
    environment.run("python", "-m", "pip", "-q", "uninstall", "-y", "torch")
    environment.run("python", "-c", SERVED)
    assert "none is installed, and servers need none" in environment.run("sparserow", "--version")


@pytest.mark.full("test_packaging.py looks at the names in a wheel")
def test_a_wheel_names_all_that_is_inside_and_no_folder_of_its_build(tmp_path: Path, wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "inside")
        texts = {name: archive.read(name) for name in archive.namelist()}
    libraries = [name for name in texts if name.startswith("sparserow.libs/")]
    assert {name.partition("-")[0] for name in libraries} == {f"sparserow.libs/{name}" for name in BUNDLED}
    assert [name for name, data in texts.items() if os.fsencode(ROOT) in data] == []
    assert not any(name.startswith(("sparserow/deploy/package/", "sparserow/deploy/bench/")) for name in texts)
    (bill,) = (json.loads(data) for name, data in texts.items() if name.endswith(".cdx.json"))
    (notice,) = (data.decode() for name, data in texts.items() if name.endswith("/licenses/NOTICE"))
    names = {each["name"] for each in bill["components"]}
    assert {"librocksdb7.8", "libssl3", "libbz2-1.0", "libasio-dev", "libxxhash-dev", "pybind11"} <= names
    assert all(f"\n  {each['name']} {each['version']}\n" in notice for each in bill["components"])
    for library in [name for name in texts if name.endswith(".so") or ".so." in name]:
        command = ["objdump", "-p", tmp_path / "inside" / library]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths = [line for line in shown.splitlines() if "RPATH" in line or "RUNPATH" in line]
        assert all(each.startswith("$ORIGIN") for line in paths for each in line.split()[-1].split(":")), library
        assert "libpython" not in shown
