"""The Grafana dashboard and the alert rules use metrics that exist, with labels that those have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sparserow.deploy.reference.metrics_reference import all_metrics
from sparserow.ps_server.coordinator.state.shards import ShardPhase

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
FAQ = FOLDER.parent.parent / "docs" / "faq.md"
OF_THE_SYSTEM = {"Address already in use"}
OF_PROMETHEUS = {"instance", "le"}


def alerts() -> list[dict[str, object]]:
    document = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    """(where it stands, expression)"""
    found = [(str(rule["alert"]), str(rule["expr"])) for rule in alerts()]
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    found += [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return found


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """Labels by the name that a query may use."""
    exported = [each for metrics in all_metrics().values() for each in metrics]
    return {name: {*each.labels, *OF_PROMETHEUS} for each in exported for name in each.samples}


@pytest.mark.parametrize(("where", "query"), queries(), ids=lambda value: value[:40])
def test_a_query_uses_what_exists(where: str, query: str, samples: dict[str, set[str]]) -> None:
    names = re.findall(r"\bsparserow_\w+", query)
    assert names, where
    assert set(names) <= samples.keys(), where
    shared = set.intersection(*(samples[name] for name in names))
    for listed in re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", query):
        assert {label.strip() for label in listed.split(",")} <= shared, where
    for name, matchers in re.findall(r"(sparserow_\w+)\{([^}]*)\}", query):
        assert {matcher.split("=")[0].strip("! ~") for matcher in matchers.split(",")} <= samples[name], where
    if re.search(r"\brate\(|\bincrease\(", query):
        counted = [name for name in names if name.endswith(("_total", "_bucket", "_sum", "_count"))]
        assert counted, f"{where}: only what counts has a rate"


def test_values_of_labels_exist() -> None:
    kinds = {"pull", "pull_waited", "lookup", "commit", "write", "scan", "other"}
    for where, query in queries():
        assert set(re.findall(r'request="(\w+)"', query)) <= kinds, where
        assert set(re.findall(r'state="(\w+)"', query)) <= {phase.name.lower() for phase in ShardPhase}, where


def test_texts_name_labels_that_their_query_keeps(samples: dict[str, set[str]]) -> None:
    for rule in alerts():
        query, texts = str(rule["expr"]), rule["annotations"]
        grouped = re.findall(r"\bby \(([^)]*)\)", query)
        labels = set.intersection(*(samples[name] for name in re.findall(r"\bsparserow_\w+", query)))
        if grouped:
            labels = {label.strip() for label in grouped[0].split(",")} - {"le"}
        assert isinstance(texts, dict)
        assert texts.keys() == {"summary", "description"}, rule["alert"]
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))
        assert used <= labels, rule["alert"]


def test_each_alert_is_explained() -> None:
    explained = FAQ.read_text()
    for rule in alerts():
        assert f"`{rule['alert']}`" in explained, f"{rule['alert']} is missing in docs/faq.md"


def test_texts_of_errors_in_the_faq_are_those_of_the_code() -> None:
    root = FOLDER.parent.parent
    sources = [
        path
        for folder in ("proto", "ps_server", "worker", "deploy", "cpp_ext")
        for path in (root / folder).rglob("*.[pch]*")
    ]
    text = " ".join(path.read_text() for path in sources if path.suffix in (".py", ".cc", ".h"))
    code = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", text))
    quoted = [cell for line in FAQ.read_text().splitlines() for cell in re.findall(r"`([^`]*\.\.\.[^`]*)`", line[2:])]
    assert len(quoted) > 15
    for quote in quoted:
        pieces = [piece.strip(" ;:,.") for piece in re.sub(r"^[A-Z]\w+: ", "", quote).split("...")]
        for piece in pieces:
            if len(piece) >= 8 and "127.0.0.1" not in piece and piece not in OF_THE_SYSTEM:
                assert piece in code, f"{quote}: {piece!r} is in no message"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(FOLDER / "alerts.yaml")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource"}
