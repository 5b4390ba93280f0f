"""The page of ``sparserow report`` in a headless Chromium, for runs of each kind of metric."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, browser
from sparserow.deploy.cli import main
from sparserow.worker.data import write_click_log

pytest.importorskip("plotly")
JOB = Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "demo.yaml"
LOOK = """return [...document.querySelectorAll('.js-plotly-plot')].map(chart => ({
  title: chart.closest('section').querySelector('h2').textContent,
  points: [...chart.querySelectorAll('.point')].length,
  x: chart.querySelector('.xtitle')?.textContent, y: chart.querySelector('.ytitle')?.textContent,
  ticks: chart.querySelectorAll('.xtick').length && chart.querySelectorAll('.ytick').length,
  names: [...chart.querySelectorAll('.legendtext')].map(it => it.textContent),
  inside: chart.querySelector('.main-svg').getBoundingClientRect().right <= document.documentElement.clientWidth,
}))"""
PLACES = """return [...document.querySelectorAll('.js-plotly-plot')].map(chart => [
  chart.querySelector('.modebar').getBoundingClientRect().bottom,
  chart.querySelector('.legend').getBoundingClientRect().top])"""
BINARY = ("click.auc", "click.log_loss", "click.normalized_entropy", "click.calibration", "click.gauc")
RANKS = ("buy.loss", "buy.mrr", "buy.hit_rate@10", "buy.ndcg@10")
KINDS = {
    "binary": (BINARY, ()),
    "regression": (("watch.mse", "watch.mae"), ()),
    "several": (("like.auc", "click.auc", "watch.mse"), ()),
    "ranks": (RANKS, ()),
    "windows": (("click.auc",), ("window",)),
    "within": (("click.auc", "click.calibration[0,0.1)"), ("test",)),
    "markup": (("<img src=x onerror=alert(1)>.auc",), ()),
}


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def report_of(path: Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path)])
    assert not ended.value.code
    return path.with_suffix(".html").as_uri()


def shown(chrome: Browser, url: str) -> list[dict[str, Any]]:
    """The charts of a page that has no error, asks for nothing but itself and is as wide as the window."""
    chrome.open(url)
    charts: list[dict[str, Any]] = chrome.run(LOOK)
    assert chrome.errors() == []
    assert [each for each in chrome.requests() if not each.startswith(("data:", "blob:"))] == [url]
    assert charts
    for chart in charts:
        assert chart["points"] > 0, chart
        assert chart["ticks"] > 0, chart
        assert chart["names"], chart
        assert chart["inside"], chart
        assert (chart["x"], chart["y"]) == ("samples", chart["title"])
    return charts


def lines(metrics: Sequence[str], others: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {"kind": "run", "job": "shop"}
    for number in (1, 2):
        yield {"kind": "progress", "epoch": number, "samples": 500, "loss": 0.6 / number, "auc": 0.7}
        values = dict.fromkeys(metrics, 0.5 / number)
        for kind in others:
            names = {name.rpartition(".")[2]: value for name, value in values.items()} if kind == "window" else values
            yield {"kind": kind, "epoch": number, "samples": 600, "metrics": names}
        end = {"train_loss": 0.5 / number, "samples_per_sec": 1e5, "metrics": values}
        yield {"kind": "epoch", "epoch": number, "samples": 1000, **end}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_metric_has_charts(chrome: Browser, tmp_path: Path, kind: str) -> None:
    metrics, others = KINDS[kind]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(metrics, others)))
    charts = {chart["title"]: chart for chart in shown(chrome, report_of(path))}
    assert charts.keys() == {
        "loss",
        "auc",
        "samples per second",
        *(name.rpartition(".")[2] for name in metrics if "[" not in name),
    }
    for name in metrics:
        task, _, metric = name.rpartition(".")
        assert "[" in name or f"test {task}" in charts[metric]["names"]
    assert ("progressive" in charts["auc"]["names"]) == ("window" in others)
    assert chrome.run("return document.images.length") == 0


def test_a_page_fits_a_phone_and_is_dark_where_that_is_preferred(chrome: Browser, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines((*BINARY, *RANKS), ("test",))))
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    chrome.devtools("Emulation.setDeviceMetricsOverride", **phone)
    chrome.devtools("Emulation.setEmulatedMedia", **dark)
    try:
        shown(chrome, report_of(path))
        assert chrome.run("return document.documentElement.scrollWidth") <= phone["width"]
        for buttons_end, names_begin in chrome.run(PLACES):
            assert buttons_end <= names_begin, "buttons would cover names that take several lines"
        colours = "return ['body', '.xtitle'].map(it => getComputedStyle(document.querySelector(it)))"
        body, title = chrome.run(colours + ".map((it, index) => index ? it.fill : it.backgroundColor)")
        assert (body, title) == ("rgb(20, 23, 27)", "rgb(232, 235, 239)")
    finally:
        chrome.devtools("Emulation.clearDeviceMetricsOverride")
        chrome.devtools("Emulation.setEmulatedMedia", features=[])


def test_the_run_of_a_job(chrome: Browser, tmp_path: Path) -> None:
    log = write_click_log(tmp_path, rows=2_000, test_rows=200, seed=3)
    path = tmp_path / "run.jsonl"
    settings = [f"data.train={log.train}", f"data.test={log.test}", "model.args.rows={'*': 5000}", "train.epochs=2"]
    settings += ["model.min_rows=1", "train.workers=1", "train.batch_size=128", "train.test_every={samples: 1000}"]
    settings += [f"metrics={{progressive: {{window: 500}}, file: {path}}}"]
    with pytest.raises(SystemExit) as ended:
        main(["train", str(JOB), *(part for setting in settings for part in ("--set", setting))])
    assert not ended.value.code
    charts = {chart["title"]: chart for chart in shown(chrome, report_of(path))}
    assert {"loss", "auc", "log_loss", "calibration", "samples per second"} <= charts.keys()
    assert "progressive" in charts["auc"]["names"]
