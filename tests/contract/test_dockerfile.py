"""deploy/Dockerfile names what the Makefile and pyproject.toml name, and its image of servers needs no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sparserow.deploy.launch.security_files import init_security
from sparserow.deploy.package import build_images
from sparserow.deploy.server_requirements import OF_WORKERS, server_requirements
from sparserow_process import Launcher, wait_until

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def stage(name: str) -> str:
    """The lines of a stage."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def packages(name: str) -> set[str]:
    """Of apt, that a stage installs."""
    (words,) = re.findall(r"--no-install-recommends(.*?)&&", stage(name).replace("\\\n", " "), re.DOTALL)
    return set(words.split())


def test_it_is_built_of_what_the_makefile_installs() -> None:
    (apt,) = re.findall(r"^APT_PACKAGES := (.*)$", MAKEFILE, re.MULTILINE)
    assert packages("build") == set(apt.split())
    (torch,) = re.findall(r"^TORCH \?= (.*)$", MAKEFILE, re.MULTILINE)
    assert set(re.findall(r"^ARG TORCH=(.*)$", DOCKERFILE, re.MULTILINE)) == {torch}
    for copied in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split()[:-1])
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"--from=(\S+)", DOCKERFILE)) <= set(stages)
    assert {"server", "worker", "worker-cuda"} <= set(stages)


def test_servers_need_all_dependencies_but_those_of_workers() -> None:
    named = ["grpcio>=1", "torch>=2.13", "pyarrow>=18", "numpy>=1"]
    assert server_requirements({"project": {"dependencies": named}}) == ["grpcio>=1", "numpy>=1"]
    printed = subprocess.run(
        [sys.executable, ROOT / "deploy" / "server_requirements.py"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [each for each in declared if not each.startswith(("torch", "pyarrow"))] == printed
    assert len(printed) == len(declared) - 2
    assert "torch" not in stage("server") + stage("server-environment")
    assert "torch" in stage("worker-environment").lower()
    rest = "RUN pip install -q -c /wheels/versions.txt sparserow\n"
    assert rest in stage("worker-environment")
    assert rest in stage("worker-cuda-environment")


def test_images_have_no_pip() -> None:
    assert "python3 -m venv --without-pip /opt/sparserow" in stage("server-environment")
    assert "PIP_PYTHON=/opt/sparserow/bin/python" in stage("server-environment")
    assert "/opt/sparserow/bin/pip" not in DOCKERFILE


def test_images_that_are_built_have_a_stage_and_the_version_of_the_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    assert set(build_images.TARGETS) <= stages
    base = (ROOT / "deploy" / "k8s" / "base" / "kustomization.yaml").read_text()
    assert f'newTag: "{build_images.project_version()}"' in base
    monkeypatch.setattr(build_images, "has_docker", lambda: True)
    assert isinstance(build_images.builder(), build_images.Docker)
    monkeypatch.setattr(build_images, "has_docker", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="need Docker, or root with the Debian packages mmdebstrap and buildah"):
        build_images.builder()


def test_pip_in_a_build_finds_packages_where_pip_outside_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "ca.pem").touch()
    (tmp_path / "index-2" / "simple").mkdir(parents=True)
    indexes = [f"file://{tmp_path}/{name}/simple" for name in ("index", "index-2")]
    listed = [
        f":env:.cert='{tmp_path}/ca.pem'",
        f"global.cert='{tmp_path}/other.pem'",
        f"global.extra-index-url='\\nhttps://example.org/simple\\n{indexes[0]}\\n{indexes[1]}'",
        f"install.find-links='{tmp_path}/wheels'",
        "download.timeout='5'",
    ]
    monkeypatch.setattr(build_images, "run", lambda *_: "\n".join(listed))
    monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/other.pem")
    mounts = build_images.Buildah(tmp_path).pip_mounts()
    assert mounts == [
        f"{tmp_path}/ca.pem:/mnt/pip/0:ro",
        f"{tmp_path}/index:/mnt/pip/1:ro",
        f"{tmp_path}/index-2:/mnt/pip/2:ro",
        f"{tmp_path}/wheels:/mnt/pip/3:ro",
        f"{tmp_path}/pip.conf:/etc/pip.conf:ro",
    ]
    assert (tmp_path / "pip.conf").read_text().splitlines() == [
        "[global]",
        "cert = /mnt/pip/0",
        "extra-index-url = https://example.org/simple file:///mnt/pip/1/simple file:///mnt/pip/2/simple",
        "find-links = /mnt/pip/3",
    ]


def test_the_image_for_cuda_is_the_workers_with_another_build_of_torch() -> None:
    environment, image = stage("worker-cuda-environment"), stage("worker-cuda")
    assert "ARG TORCH_PIP=\n" in environment, "no place of packages is named"
    assert 'pip install -q ${TORCH_PIP} "${TORCH}"' in environment
    assert "assert torch.version.cuda" in environment
    assert packages("server") - {"python3", "ca-certificates"} == packages("worker-cuda-environment")
    assert "COPY --from=worker-cuda-environment /opt/sparserow /opt/sparserow" in image
    assert {"gcc", "python3-dev"} <= packages("worker-cuda"), "with which Triton compiles launchers"
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", image)
    train = (ROOT / "deploy" / "k8s" / "base" / "train.yaml").read_text()
    assert "readOnlyRootFilesystem: true" in train
    assert any(cache.startswith(f"{mount}/") for mount in re.findall(r"mountPath: (/tmp)\b", train))
    assert image.index("USER root") < image.index("apt-get") < image.index("USER 10001")
    for target in (image, stage("worker")):
        assert 'ENTRYPOINT []\nCMD ["sparserow", "--help"]\n' in target


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.skipif("bookworm" not in Path("/etc/os-release").read_text(), reason="the image is of Debian 12")
def test_the_image_of_servers_has_the_libraries_of_the_native_core() -> None:
    built = [ROOT / "cpp_ext" / "libsparserow_core.so", *(ROOT / "cpp_ext").glob("_server*.so")]
    assert len(built) == 2
    needed = set()
    for library in built:
        shown = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True).stdout
        needed |= set(re.findall(r"NEEDED\s+(\S+)", shown))
    of_package = {"librocksdb.so.7.8": "librocksdb7.8", "libssl.so.3": "libssl3", "libcrypto.so.3": "libssl3"}
    # The last ones come with every one of these packages.
    own = {"libsparserow_core.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    assert needed - own <= set(of_package), "name its package here and in deploy/Dockerfile"
    assert {of_package[name] for name in needed - own} <= packages("server")


def test_servers_start_without_torch_and_tell_probes_without_a_certificate(launcher: Launcher, tmp_path: Path) -> None:
    """The environment of the image: packages of workers are absent, servers have certificates, probes have none."""
    for package in OF_WORKERS:
        absent = tmp_path / "absent" / package
        absent.mkdir(parents=True)
        (absent / "__init__.py").write_text(f"raise ImportError('no {package} in this image')\n")
    launcher.environment["PYTHONPATH"] = f"{tmp_path / 'absent'}:{os.environ.get('PYTHONPATH', '')}"
    security = f"--security={init_security(tmp_path / 'security', ['127.0.0.1'], valid_sec=3600)}"
    probed = "--health-port=0"
    coordinator = launcher.start(security, "coordinator", "--shards=1", "--port=0", probed)
    address = coordinator.wait_for(r"coordinator at (\S+:\d+)")[1]
    shard = launcher.start(security, "ps", f"--coordinator={address}", "--shard=0", probed)
    for process in (coordinator, shard):
        port = process.wait_for(r"health is answered at 127\.0\.0\.1:(\d+)")[1]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def is_serving(stub: object = stub) -> bool:
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=60)  # type: ignore[attr-defined]
                return reply.status == health_pb2.HealthCheckResponse.SERVING

            wait_until(is_serving, "health to say SERVING")
            call = channel.unary_unary("/sparserow.v1.Coordinator/GetStatus")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=60)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    refused_port = launcher.start("ps", "--coordinator=127.0.0.1:1", "--shard=0", "--health-port=65536")
    assert "--health-port: 65536 is not allowed; allowed: an integer >= 0 and <= 65535" in refused_port.error_line()
