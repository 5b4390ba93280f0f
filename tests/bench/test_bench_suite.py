"""``bench all`` sums up runs and goes on after an interruption; ``bench compare`` tells what moved."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sparserow.deploy import cli
from sparserow.deploy.bench import optimizers, suite
from sparserow.deploy.bench.harness import Figure, write_json
from sparserow.deploy.bench.ratio_plot import ratio_svg
from sparserow.deploy.bench.suite import BenchmarkRun, Suite, left_of, summed_up
from sparserow.deploy.cli import main
from sparserow.deploy.commands.bench import BENCHMARKS

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs ``sparserow bench WORDS``; returns the exit status and what was printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *map(str, words)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_outside_a_checkout_one_line_says_where_benchmarks_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparserow.cpp_ext._bench", None)
    for words in (("engine", "--quick"), ("all",), ("compare", "a.json", "b.json")):
        code, out, err = call(*words)
        assert (code, out) == (1, "")
        (line,) = err.splitlines()
        assert line.startswith("sparserow: FailedPrecondition: bench: benchmarks run in a checkout")
        assert "clone" in line
        assert "make setup" in line


def figure(metric: str, value: float, ratio: float | None = None, limit: float | None = None) -> dict[str, Any]:
    return {
        "metric": metric,
        "value": value,
        "unit": "M rows/s",
        "limit": limit,
        "ratio": ratio,
        "higher_is_better": True,
    }


def runs_of(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, int], bool] = lambda *_: False) -> list[str]:
    """Has the suite run nothing, and returns the list of what it was asked to run."""
    asked: list[str] = []

    def run(name: str, quick: bool) -> BenchmarkRun:
        asked.append(name)
        if fails(name, len(asked)):
            return BenchmarkRun(name, 0, 0.5, [], "boom")
        return BenchmarkRun(name, 0, 2.0, [figure("pull", 10.0 + len(asked), 0.5 + len(asked) / 100, 0.6)])

    monkeypatch.setattr(suite, "run_process", run)
    return asked


def test_rounds_alternate_and_an_interrupted_suite_goes_on(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "all.json"

    def stop(name: str, count: int) -> bool:
        if count == 4:
            raise KeyboardInterrupt
        return False

    asked = runs_of(monkeypatch, stop)
    assert call("all", "--only", "engine,wire", "--rounds", 3, "--json", path)[0] == 130
    assert asked == ["engine", "wire", "wire", "engine"]
    assert [(run.benchmark, run.round) for run in Suite.read(path).runs] == [("engine", 0), ("wire", 0), ("wire", 1)]
    asked = runs_of(monkeypatch)
    code, out, _ = call("all", "--only", "engine,wire", "--rounds", 3, "--json", path, "--plot", tmp_path / "all.svg")
    assert code == 0
    assert asked == ["engine", "engine", "wire"], "what the file has is not run again"
    assert "3 runs are left: 6 minutes" in out
    assert "governor: " in out
    assert "kernel: " in out
    assert out.count("missed: pull") == 2
    assert json.loads(path.read_text())["summary"][0]["runs"] == 3
    root = ElementTree.parse(tmp_path / "all.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 4, "a bar and a limit for each figure"
    assert call("all", "--only", "engine,wire", "--rounds", 3, "--json", path, "--strict")[0] == 1


def test_a_benchmark_that_fails_is_told_and_run_again(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "all.json"
    runs_of(monkeypatch, lambda name, _: name == "wire")
    code, out, err = call("all", "--only", "engine,wire", "--rounds", 2, "--json", path)
    assert code == 1
    assert "wire, round 1: boom" in out
    assert "failed: wire" in err
    asked = runs_of(monkeypatch)
    assert call("all", "--only", "engine,wire", "--rounds", 2, "--json", path)[0] == 0
    assert asked == ["wire", "wire"]


def test_figures_of_another_machine_are_not_gone_on_with(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "all.json"
    runs_of(monkeypatch)
    assert call("all", "--only", "engine", "--rounds", 1, "--json", path)[0] == 0
    code, _, err = call("all", "--only", "engine", "--quick", "--json", path)
    assert code == 1
    assert "full sizes" in err
    document = json.loads(path.read_text())
    document["machine"]["kernel"] = "1.0"
    path.write_text(json.dumps(document))
    code, _, err = call("all", "--only", "engine", "--json", path)
    assert code == 1
    assert "kernel '1.0'" in err
    path.write_text("[]")
    assert "is not a file of `sparserow bench all`" in call("all", "--only", "engine", "--json", path)[2]
    assert "'nothing' is no benchmark" in call("all", "--only", "engine,nothing")[2]


def test_a_benchmark_that_misses_its_limit_says_so(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "FULL", replace(optimizers.QUICK, rows=2_000, batch=200, repetitions=3))
    monkeypatch.setattr(optimizers, "MEASURED", {"sgd": optimizers.MEASURED["sgd"]})
    monkeypatch.setattr(optimizers, "LIMIT", 0.0)
    code, out, _ = call("optimizers")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("missed: sgd")]
    assert call("optimizers", "--strict")[0] == 1
    monkeypatch.setattr(optimizers, "LIMIT", 1e9)
    code, out, _ = call("optimizers", "--strict")
    assert code == 0
    assert "missed" not in out


def test_every_benchmark_can_be_strict() -> None:
    bench: Any = cli._command("bench")
    assert set(BENCHMARKS) < set(bench.commands)
    for name, command in bench.commands.items():
        assert "--strict" in {option for parameter in command.params for option in parameter.opts}, name


def test_a_run_is_a_process_whose_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = suite.run_process("nothing", quick=True)
    assert made.figures == []
    assert "No such command 'nothing'" in made.error


def test_a_summary_has_medians_and_spreads() -> None:
    runs = [
        BenchmarkRun("engine", place, 1.0, [figure("pull", value, value / 10)]) for place, value in enumerate((4, 8, 5))
    ]
    (each,) = summed_up(runs)
    assert (each.median, each.least, each.most, each.ratio, each.runs) == (5, 4, 8, 0.5, 3)
    assert each.spread == pytest.approx(0.8)
    assert left_of(Suite({}, False, runs), ["engine", "wire"], 3) == [("wire", 0), ("wire", 1), ("wire", 2)]
    assert "…" in ratio_svg(summed_up([BenchmarkRun("engine", 0, 1.0, [figure("x" * 99, 1.0, 0.5, 0.6)])]))


def test_what_moved_more_than_its_spread_is_told(call: Call, tmp_path: Path) -> None:
    def write(name: str, **ratios: list[float]) -> Path:
        runs = [
            BenchmarkRun(
                "engine", place, 1.0, [figure(metric, 1.0, values[place]) for metric, values in ratios.items()]
            )
            for place in range(3)
        ]
        path = tmp_path / name
        Suite({}, False, runs).write(path)
        return path

    before = write("a", steady=[0.50, 0.51, 0.49], noisy=[0.3, 0.5, 0.7], better=[0.5] * 3, gone=[1.0] * 3)
    after = write("b", steady=[0.51, 0.50, 0.50], noisy=[0.4, 0.6, 0.8], better=[0.7] * 3, came=[1.0] * 3)
    code, out, _ = call("compare", before, after, "--strict")
    assert code == 0
    assert "1 of 3 figures moved" in out
    assert "+40.0%" in out
    assert [line for line in out.splitlines() if "only in one file" in line] == [
        "only in one file: came",
        "only in one file: gone",
    ]
    assert call("compare", after, before, "--strict")[0] == 1, "what became worse"
    one, other = tmp_path / "one", tmp_path / "other"
    write_json(one, [Figure("pull", 10.0, "us", higher_is_better=False)])
    write_json(other, [Figure("pull", 12.0, "us", higher_is_better=False)])
    assert call("compare", one, other, "--strict")[0] == 1
    assert call("compare", other, one, "--strict")[0] == 0
    assert "there is no such file" in call("compare", one, tmp_path / "none")[2]
    one.write_text("{}")
    assert "is not a file of figures" in call("compare", one, other)[2]
