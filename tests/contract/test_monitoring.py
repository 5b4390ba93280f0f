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


def faults_of(query: str, samples: dict[str, set[str]]) -> list[str]:
    """What is wrong with a query."""
    names = re.findall(r"\bsparserow_\w+", query)
    unknown = sorted(set(names) - samples.keys())
    if unknown or not names:
        return [f"there is no metric {name}" for name in unknown] or ["it names no metric"]
    faults = []
    shared = set.intersection(*(samples[name] for name in names))
    for listed in re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", query):
        wrong = sorted({label.strip() for label in listed.split(",")} - shared)
        faults += [f"not all its metrics have the label {label}" for label in wrong]
    for name, matchers in re.findall(r"(sparserow_\w+)\{([^}]*)\}", query):
        wrong = sorted({matcher.split("=")[0].strip("! ~") for matcher in matchers.split(",")} - samples[name])
        faults += [f"{name} has no label {label}" for label in wrong]
    counts = any(name.endswith(("_total", "_bucket", "_sum", "_count")) for name in names)
    if re.search(r"\brate\(|\bincrease\(", query) and not counts:
        faults.append("only what counts has a rate")
    return faults


def test_a_query_uses_what_exists(samples: dict[str, set[str]]) -> None:
    assert len(queries()) > 50
    wrong = [f"{where}: {query}: {fault}" for where, query in queries() for fault in faults_of(query, samples)]
    assert not wrong, "\n".join(wrong)


def test_values_of_labels_exist() -> None:
    kinds = {"pull", "pull_waited", "lookup", "commit", "write", "scan", "other"}
    phases = {phase.name.lower() for phase in ShardPhase}
    wrong = [
        f'{where}: {label}="{value}"'
        for where, query in queries()
        for label, values in (("request", kinds), ("state", phases))
        for value in re.findall(rf'{label}="(\w+)"', query)
        if value not in values
    ]
    assert not wrong, "\n".join(wrong)


def test_texts_name_labels_that_their_query_keeps(samples: dict[str, set[str]]) -> None:
    wrong = []
    for rule in alerts():
        query, texts = str(rule["expr"]), rule["annotations"]
        grouped = re.findall(r"\bby \(([^)]*)\)", query)
        labels = set.intersection(*(samples[name] for name in re.findall(r"\bsparserow_\w+", query)))
        if grouped:
            labels = {label.strip() for label in grouped[0].split(",")} - {"le"}
        assert isinstance(texts, dict)
        if texts.keys() != {"summary", "description"}:
            wrong.append(f"{rule['alert']}: its texts are {', '.join(texts)}")
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))
        wrong += [f"{rule['alert']}: its query keeps no label {label}" for label in sorted(used - labels)]
    assert not wrong, "\n".join(wrong)


def test_each_alert_is_explained() -> None:
    explained = FAQ.read_text()
    wrong = [str(rule["alert"]) for rule in alerts() if f"`{rule['alert']}`" not in explained]
    assert not wrong, f"missing in docs/faq.md: {', '.join(wrong)}"


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
    wrong = [
        f"{quote}: {piece!r} is in no message"
        for quote in quoted
        for piece in (part.strip(" ;:,.") for part in re.sub(r"^[A-Z]\w+: ", "", quote).split("..."))
        if len(piece) >= 8 and "127.0.0.1" not in piece and piece not in OF_THE_SYSTEM and piece not in code
    ]
    assert not wrong, "\n".join(wrong)


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
