"""The oldest versions of gRPC and protobuf that are allowed are those that the generated stubs run with."""

from __future__ import annotations

import re
import tomllib

from rooms import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def floor_of(package: str) -> str:
    """The least version of a dependency that pyproject.toml allows."""
    (found,) = [each for each in PROJECT["project"]["dependencies"] if each.startswith(f"{package}>=")]
    return str(found.partition(">=")[2])


def test_floors_are_what_the_stubs_need() -> None:
    """A stub refuses a runtime that is older than its generator, and says so only when it is imported."""
    stubs, messages = sorted((ROOT / "proto").glob("*_pb2_grpc.py")), sorted((ROOT / "proto").glob("*_pb2.py"))
    needed = {re.findall(r"^GRPC_GENERATED_VERSION = '([\d.]+)'", each.read_text(), re.MULTILINE)[0] for each in stubs}
    for package in ("grpcio", "grpcio-health-checking", "grpcio-reflection"):
        assert needed == {floor_of(package)}
    (runtime,) = {
        ".".join(re.findall(r"\d+", each.read_text().partition("Domain.PUBLIC,")[2])[:3]) for each in messages
    }
    assert runtime == floor_of("protobuf")


def test_the_generator_is_one_version_and_not_the_newest() -> None:
    """Stubs of a later generator would need later packages than the dependencies say."""
    (generator,) = [each for each in PROJECT["build-system"]["requires"] if each.startswith("grpcio-tools")]
    assert generator == f"grpcio-tools=={floor_of('grpcio')}"
