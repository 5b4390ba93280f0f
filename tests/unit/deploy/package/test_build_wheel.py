"""A wheel names the torches and the Pythons that it has libraries for."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparserow.deploy.package.build_wheel import name_what_is_inside, required_torch
from sparserow.deploy.package.more_builds import build_bindings, torch_folder


@pytest.mark.parametrize(
    ("minors", "requirement"),
    [
        (["2.13"], "torch>=2.13,<2.14"),
        (["2.14", "2.9", "2.10", "2.11", "2.12", "2.13"], "torch>=2.9,<2.15"),
        (["2.14", "2.10", "2.12"], "torch>=2.10,<2.15,!=2.11.*,!=2.13.*"),
    ],
)
def test_the_requirement_of_torch_is_what_there_are_operators_for(minors: list[str], requirement: str) -> None:
    assert required_torch(minors) == requirement


def test_torches_of_two_major_versions_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"TORCHES: 3\.0, 2\.14 is not allowed; allowed: one major version"):
        required_torch(["3.0", "2.14"])


def test_what_is_inside_is_named(tmp_path: Path) -> None:
    core, information = tmp_path / "sparserow" / "cpp_ext", tmp_path / "sparserow-0.2.0.dist-info"
    core.mkdir(parents=True)
    information.mkdir()
    for name in ("_client.cpython-311-x86_64-linux-gnu.so", "_client.cpython-312-x86_64-linux-gnu.so"):
        (core / name).touch()
    for minor in ("2.12", "2.13"):
        (core / f"libsparserow_ops-{minor}.so").touch()
    (information / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n\n")
    metadata = information / "METADATA"
    others = "Requires-Dist: torchdata>=1; extra == 'x'\n\ntorch of the text\n"
    metadata.write_text(f"Requires-Dist: torch==2.13.*\n{others}")
    name_what_is_inside(tmp_path)
    tags = [line for line in (information / "WHEEL").read_text().splitlines() if line.startswith("Tag: ")]
    assert [tag.rpartition("-linux_")[0] for tag in tags] == ["Tag: cp311-cp311", "Tag: cp312-cp312"]
    assert metadata.read_text() == f"Requires-Dist: torch>=2.12,<2.14\n{others}"


def test_a_torch_or_a_python_that_is_none() -> None:
    with pytest.raises(SystemExit, match=r"TORCHES: '2' is not allowed; allowed: minor versions, such as 2\.12"):
        torch_folder("2")
    with pytest.raises(SystemExit, match=r"PYTHONS: 'python9\.9' is not allowed; allowed: interpreters of Python"):
        build_bindings("python9.9")
