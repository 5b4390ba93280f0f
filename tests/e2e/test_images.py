"""The images of deploy/Dockerfile, built and run without a daemon: servers of deploy/compose.yaml, and a worker."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from compose_services import VOLUME, LocalServices, compose_services, server_services
from sparserow.deploy.package.build_images import FOLDER, TOOLS, Buildah
from sparserow_process import Process, wait_until

pytestmark = [
    pytest.mark.full("tests/e2e/test_compose.py runs the same servers as processes"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"needs root, and the Debian packages {' and '.join(TOOLS)}",
    ),
]
MOST_BYTES, MOST_OF_PACKAGES = 350e6, 200e6
TRAINING = f"""
import torch
from torch import nn
import sparserow as sr

model = nn.Sequential(nn.EmbeddingBag(1_000, 4, mode="sum"), nn.Linear(4, 1))
with sr.connect("COORDINATOR", "ads") as session:
    model = session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = torch.arange(999).reshape(333, 3)
    for _ in range(5):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids)[:, 0], (ids[:, 0] % 2).float())
        loss.backward()
        session.step(dense)
    session.publish("ads", root="{VOLUME}/models", model=model, example=(ids,))
print("published")
"""


class Containers:
    """Containers that run as processes of this machine, with one folder as their volume."""

    def __init__(self, images: Buildah, folder: Path) -> None:
        self._images, self._folder = images, folder
        self.volume = folder / "volume"
        self.volume.mkdir()
        os.chown(self.volume, 10001, 10001)
        self._stack = ExitStack()
        self._started: list[Process] = []

    def start(self, image: str, *command: str) -> Process:
        """Runs a command in a new container of an image."""
        container = self._stack.enter_context(self._images.container(image))
        run = self._images.run_command(container, f"{self.volume}:{VOLUME}", *command)
        self._started.append(
            Process([str(word) for word in run], image, self._folder, dict(os.environ), subprocess.DEVNULL)
        )
        return self._started[-1]

    def close(self) -> None:
        """Ends what runs, and removes the containers."""
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.popen.pid).children(recursive=True):
                    each.kill()
            process.end()
        self._stack.close()


@pytest.fixture(scope="module")
def images() -> Buildah:
    """The images, which are built where they are older than the sources."""
    built = Buildah(FOLDER)
    for target in ("server", "worker"):
        built.build(target, compose_services()["coordinator" if target == "server" else "worker"]["image"])
    return built


@pytest.fixture
def containers(images: Buildah, tmp_path: Path) -> Iterator[Containers]:
    made = Containers(images, tmp_path)
    yield made
    made.close()


def main_process(process: Process) -> psutil.Process:
    """The process of a container that runs its command; those of buildah above it would kill it."""
    (found,) = (
        each
        for each in psutil.Process(process.popen.pid).children(recursive=True)
        if [Path(word).name for word in each.cmdline()[:2]] == ["python", "sparserow"]
    )
    return found


def test_the_image_of_servers_is_small_and_has_no_pip(images: Buildah) -> None:
    image = compose_services()["coordinator"]["image"]
    whole, packages = images.sizes(image)
    print(f"{image}: {whole / 1e6:.0f} MB, of which {packages / 1e6:.0f} MB are Python packages")
    assert packages < MOST_OF_PACKAGES
    assert whole < MOST_BYTES
    with images.mounted(image) as root:
        found = {path.name for path in root.glob("opt/sparserow/lib/python3*/site-packages/*")}
        assert "numpy" in found
        assert found.isdisjoint({"pip", "setuptools", "torch", "pyarrow"})
        settings = root / "etc" / "pip.conf"
        assert not settings.exists() or settings.read_text() == "", "they stay with the caller"


def test_servers_have_what_they_import_late(containers: Containers) -> None:
    image = compose_services()["coordinator"]["image"]
    made = containers.start(image, "sparserow", "security", "init", f"{VOLUME}/security", "--host=127.0.0.1")
    assert made.end() == 0, made.err
    assert (containers.volume / "security" / "ca.pem").exists()
    to_s3 = "import s3fs, botocore.session as aws; aws.get_session().create_client('s3', region_name='us-east-1')"
    client = containers.start(image, "python3", "-c", to_s3)
    assert client.end() == 0, client.err


def test_containers_train_publish_serve_and_drain(containers: Containers) -> None:
    local = LocalServices(Path(VOLUME))
    services = server_services()

    def start(name: str) -> Process:
        return containers.start(services[name]["image"], "sparserow", *local.arguments(name))

    start("coordinator").wait_for(r"coordinator at \S+, waiting for 2 shards")
    shards = [start("ps-0"), start("ps-1")]
    (containers.volume / "train.py").write_text(TRAINING.replace("COORDINATOR", local.address("coordinator:7000")))
    trained = containers.start(compose_services()["worker"]["image"], "python", f"{VOLUME}/train.py")
    trained.wait_for("published")
    assert trained.end() == 0, trained.err
    start("serving").wait_for("serving ads@live ready at")
    request = f"http://{local.address('serving:7102')}/v1/lookup"
    body = json.dumps({"model": "ads", "tables": {"0": [1, 2, 3]}}).encode()

    def rows() -> list[list[float]]:
        with urllib.request.urlopen(request, body, timeout=60) as reply:
            (table,) = json.load(reply)["tables"].values()
        assert all(table["found"])
        return table["rows"]

    before = rows()
    os.kill(main_process(shards[1]).pid, signal.SIGTERM)
    wait_until(lambda: shards[1].popen.poll() is not None, "the shard to drain and end")
    assert shards[1].end() == 0, shards[1].err
    assert shards[0].popen.poll() is None
    assert rows() == before, "serving has its own rows"
