"""``sparserow train --dry-run``: every job file of the project, what it says, and that nothing is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from sparserow.deploy.cli import main
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import Batch, FeatureSpec, ReadOptions, write_click_log
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow.worker.layers.deferred import deferred
from sparserow.worker.training import model_class

JOBS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "jobs").glob("*.yaml"))
ADULT = "39, Private, 77516, Bachelors, 13, Divorced, Sales, Unmarried, White, Male, 2174, 0, 40, Cuba, <=50K\n"


ZOO = ("dlrm", "deepfm", "wide_deep", "dcn", "autoint", "din", "mmoe", "sasrec", "two_tower")


def clicks() -> pa.Table:
    rows = {"click": [0, 1], "price": [1.5, 20.0], "age": [30, 40], "user": [1, 2], "item": ["a", "b"]}
    lists = {"history": [["a", "c"], ["b"]], "candidates": [["a", "b"], ["b", "c"]]}
    others = {"buy": [0, 1], "position": [0, 1], "country": ["DE", "US"]}
    return pa.table({**rows, **lists, **others, "at": pa.array([0, 3600], pa.timestamp("s"))})


def made_data(folder: Path, job: str) -> list[str]:
    """Small data in the form of a job, as ``--set`` options."""
    folder.mkdir(exist_ok=True)
    train, test = folder / "train", folder / "test"
    if job == "adult":
        for path in (train, test):
            path.write_text(ADULT * 20 + ADULT.replace("39", "51").replace("<=50K", ">50K"))
    elif job == "text":
        for path in (train, test):
            path.write_text("click,user,item,tags,price,at\n" + "yes,ada,i1,new|sale,12.5,2024-01-05T06:30:00Z\n" * 9)
    elif job in ("parquet", "features"):
        for path in (train, test):
            (path / "day=2024-01-03").mkdir(parents=True)
            pa.parquet.write_table(clicks(), path / "day=2024-01-03" / "part.parquet")
    elif job in ZOO:
        for path in (train, test):
            pa.parquet.write_table(clicks(), path)
    else:
        log = write_click_log(folder, rows=500, test_rows=100)
        train, test = Path(log.train), Path(log.test)
    return [f"--set=data.train={train}", f"--set=data.test={test}"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    return int(ended.value.code or 0)


def check_named_tensors(config: JobConfig, batch: Batch, tensors: dict[str, Any]) -> None:
    """The tensors of a dry run are those of the reader: shapes, dtypes, and the first keys."""
    named = {name: values for name, values in batch.tensors.items() if isinstance(values, torch.Tensor)}
    for name, values in batch.tensors.items():
        if not isinstance(values, torch.Tensor):
            named |= {f"{name}.values": values[0], f"{name}.offsets": values[1]}
    columns = config.data.samples
    beside = [f"labels {name}" for name in columns.labels] or ["labels"]
    assert set(tensors) == {*named, *beside, *(["groups"] if columns.group else [])}
    for name, tensor in named.items():
        assert tensors[name]["shape"] == list(tensor.shape)
        assert tensors[name]["dtype"] == str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype == torch.int64:
            assert tensors[name]["example"] == ", ".join(str(value) for value in tensor[:2].tolist())


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_every_job_of_the_project_passes(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets, result = made_data(tmp_path, job.stem), tmp_path / "dry.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert run(str(job), *sets, "--dry-run", f"--json={result}") == 0
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "a process was started"
    config = load_config(JobConfig, job, [each.removeprefix("--set=") for each in sets])
    told: dict[str, Any] = json.loads(result.read_text())
    shown = capsys.readouterr().out
    assert f"job {config.name}: 1 training and 1 test files; nothing is trained" in shown
    tensors = {each["name"]: each for each in told["tensors"]}
    tables = {each["name"]: each for each in told["tables"]}
    for name, table in tables.items():
        part, feature = name.split(".tables.")  # the wide part of a model has tables of its own
        rows = config.model.args["wide" if part == "wide" else "rows"]
        assert table["rows"] == rows[feature] if feature in rows else table["rows"] <= rows["*"]
        assert table["is_on_servers"] == (table["rows"] >= config.model.min_rows)
        assert table["bytes"] == table["rows"] * table["row_bytes"] > 0
        assert name in shown
    assert told["dense_parameters"] > 100
    assert told["pull_bytes"] > 0
    assert told["unique_keys"] >= len(tables) / 2
    features = fit_features(config.data)
    reader = open_reader(config.data, "train", features, ReadOptions(batch_size=config.train.batch_size))
    batch = next(iter(reader))
    samples = told["samples"]
    assert samples == len(batch)
    check_named_tensors(config, batch, tensors)


def test_a_mistake_is_named_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = next(path for path in JOBS if path.stem == "parquet")
    sets = made_data(tmp_path, "parquet")
    assert run(str(job), *sets, "--dry-run", "--set=data.columns.label=clicked") == 1
    assert "clicked" in capsys.readouterr().err
    assert run(str(job), "--dry-run", f"--set=data.train={tmp_path}/absent", f"--set=data.test={tmp_path}") == 1
    assert "absent" in capsys.readouterr().err


def test_it_says_where_tables_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = next(path for path in JOBS if path.stem == "demo")
    sets, result = made_data(tmp_path, "demo"), tmp_path / "dry.json"
    sets += ["--set=tables={'*.C1': {placement: device}, '*.C*': {placement: auto}}", f"--json={result}"]
    assert run(str(job), *sets, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "devices of workers" in shown
    assert "servers or devices" in shown
    told = json.loads(result.read_text())["tables"]
    assert {each["name"]: (each["placement"], each["is_on_servers"]) for each in told} == {
        each["name"]: ("device", False) if each["name"] == "embeddings.tables.C1" else ("auto", True) for each in told
    }
    assert run(str(job), *sets, "--dry-run", "--set=train.staleness=1") == 1
    assert "tables.*.C1.placement: 'device' is not allowed" in capsys.readouterr().err


DIN_ARGS = "model.args={rows: {user: 100, item: 100}, history: {clicked: item}, numbers: [age, price]}"


@pytest.mark.parametrize(
    ("job", "sets", "message"),
    [
        ("din", [DIN_ARGS], "model.args: DIN reads 'clicked', which is no feature; there are: "),
        (
            "din",
            ["model.args.numbers=[age, pric]"],
            "model.args: DIN reads 'pric', which is no feature; nearest: price",
        ),
        ("din", ["model.args.numbers=[age]"], "model.args: DIN does not read the feature 'price'; it reads: user"),
        ("mmoe", ["model.args.rows={usr: 9, item: 9}"], "model.args: MMoE reads 'usr', which is no feature; nearest"),
        ("wide_deep", ["model.args.wide={itm: 9}"], "model.args: WideDeep reads 'itm', which is no feature; nearest"),
        ("two_tower", ["model.args.item=[]"], r"model.args: TwoTower refuses them: item=[] is not allowed"),
        ("two_tower", ["model.tables={items: [item]}"], "model.tables.items: the model has no embedding layer 'item'"),
        ("two_tower", ["features.item.table=itms"], "features.item.table: there is no table 'itms'"),
    ],
)
def test_what_a_model_does_not_read_is_refused_before_a_cluster_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    sets: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("sparserow.deploy.launch.local_cluster.start_local", lambda *_, **__: pytest.fail("a cluster"))
    given = [*made_data(tmp_path, job), *(f"--set={each}" for each in sets)]
    for options in (["--dry-run"], [], ["--set=train.workers=2"]):
        assert run(str(JOBS[0].parent / f"{job}.yaml"), *given, *options) == 1
        assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("job", "sets", "message"),
    [
        ("mmoe", ["model.args.tasks=[click, bought]"], "forward returned outputs for click, bought; the tasks are"),
        ("sasrec", ["model.args.candidates=1"], "ValueError: features: a list of 'candidates' is too long"),
        (
            "sasrec",
            ["tasks.next.loss=bce", "metrics={}"],
            "tasks.next: forward returned (2, 20) for 2 samples; allowed with loss bce",
        ),
        ("din", ["features.history={kind: id, column: item}"], "features: 'history' has one value a sample"),
        ("sasrec", ["features.candidates.modulo=null", "tables={}"], "ok"),
    ],
)
def test_a_dry_run_tries_the_forward_and_the_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str, sets: list[str], message: str
) -> None:
    given = [*made_data(tmp_path, job), *(f"--set={each}" for each in sets)]
    code = run(str(JOBS[0].parent / f"{job}.yaml"), *given, "--dry-run")
    assert (code == 0) == (message == "ok")
    assert message == "ok" or message in capsys.readouterr().err.replace("\n", " ")


OWN = """
from torch import nn

class Mine(nn.Module):
    reads = {reads}

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(1000, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, **tensors):
        return self.score(self.user(tensors["user"])).squeeze(1)
"""


HOURS = """
from torch import nn

class Hours(nn.Module):
    def __init__(self, rows, most):
        super().__init__()
        self.hour = nn.Embedding(rows, 4)
        self.user = nn.EmbeddingBag(most, 4, include_last_offset=True)
        self.score = nn.Linear(4, 1)

    def forward(self, hour, history):
        return self.score(self.hour(hour) + self.user(*history)).squeeze(1)
"""


@pytest.mark.parametrize("min_rows", [10, 60], ids=["two tables", "a table and a layer"])
@pytest.mark.parametrize(
    ("rows", "most", "message"),
    [
        (25, 100, ""),
        (24, 100, "features.hour: gives 25 keys, 0 to 24, and the model fails on the greatest: model: "),
        (25, 99, "features.history: gives 100 keys, 0 to 99, and the model fails on the greatest: model: "),
    ],
)
def test_a_table_has_a_row_for_each_key_of_its_feature(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    most: int,
    message: str,
    min_rows: int,
) -> None:
    """A null hour is the 25th key, which the first samples do not have."""
    number = f"{tmp_path.name.rpartition('_')[2]}_{rows}_{most}_{min_rows}"
    (tmp_path / f"hours_{number}.py").write_text(HOURS)
    monkeypatch.syspath_prepend(tmp_path)
    model = {"class": f"hours_{number}:Hours", "min_rows": min_rows, "args": {"rows": rows, "most": most}}
    features = {
        "hour": {"kind": "time", "column": "at"},
        "history": {"kind": "multi_hot", "modulo": 100},
    }
    given = [*made_data(tmp_path, "din"), f"--set=model={json.dumps(model)}", f"--set=features={json.dumps(features)}"]
    code = run(str(JOBS[0].parent / "din.yaml"), *given, "--dry-run")
    said = capsys.readouterr().err.replace("\n", " ")
    assert (code == 0) == (not message), said
    assert message in said


@pytest.mark.parametrize(
    ("reads", "sets", "message"),
    [
        ("('user',)", [], ""),
        ("None", [], ""),
        ("('usr',)", [], "model.args: mine_{n}:Mine reads 'usr', which is no feature; nearest: user"),
        ("'user'", [], "model.class: the attribute reads of mine_{n}:Mine: 'user' is not allowed; allowed: a tuple"),
        ("None", ["features.user.modulo=null"], "model: layer 'user' looks up the id "),
        (
            "None",
            ["features={buyer: {kind: id, column: user}}"],
            "the forward of mine_{n}:Mine fails .* KeyError: 'user'",
        ),
    ],
)
def test_a_class_of_ones_own_says_what_it_reads(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reads: str,
    sets: list[str],
    message: str,
) -> None:
    number = tmp_path.name.rpartition("_")[2]  # a module is imported once in a process
    (tmp_path / f"mine_{number}.py").write_text(OWN.replace("{reads}", reads))
    monkeypatch.syspath_prepend(tmp_path)
    given = [
        *made_data(tmp_path, "din"),
        f"--set=model={{class: 'mine_{number}:Mine', min_rows: 10}}",
        "--set=features={user: {kind: id, modulo: 1000}}",
        *(f"--set={each}" for each in sets),
    ]
    code = run(str(JOBS[0].parent / "din.yaml"), *given, "--dry-run")
    told = capsys.readouterr().err.replace("\n", " ")
    assert (code == 0) == (not message), told
    assert not message or re.search(message.replace("{n}", number), told), told


SMALL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(100, 4), nn.Embedding(1000, 4)
        nn.init.orthogonal_(self.user.weight)

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(dim=1)
"""


@pytest.mark.parametrize("backend", ["ps", "local"])
def test_a_small_layer_may_begin_as_no_server_could(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """It stays in the workers, so its first rows are whatever the class makes of them."""
    (tmp_path / f"small_{backend}.py").write_text(SMALL)
    monkeypatch.syspath_prepend(tmp_path)
    least = {"ps": "min_rows: 500", "local": "backend: local"}[backend]
    given = [
        *made_data(tmp_path, "din"),
        f"--set=model={{class: 'small_{backend}:Small', {least}}}",
        "--set=features={user: {kind: id, modulo: 100}, item: {kind: id, modulo: 1000}}",
        *(["--set=cluster={}", "--set=train.prefetch=0"] if backend == "local" else []),
    ]
    assert run(str(JOBS[0].parent / "din.yaml"), *given, "--dry-run") == 0


def test_every_model_of_the_zoo_says_what_it_reads() -> None:
    for job in (path for path in JOBS if path.stem in ZOO):
        config = load_config(JobConfig, job, ["data.train=a", "data.test=b"])
        with deferred(min_rows=1):
            model = model_class.make(config.model, FeatureSpec((), ()))
        assert set(model.reads) == set(config.features), job.stem


def test_lists_and_drawn_negatives_count_in_a_step(tmp_path: Path) -> None:
    keys = {}
    for drawn in (1, 8):
        negatives = f"{{kind: uniform, per_positive: {drawn}}}"
        task = f"{{next: {{label: position, loss: softmax, item: item, negatives: {negatives}}}}}"
        sets = [
            *made_data(tmp_path / str(drawn), "sasrec"),
            f"--set=tasks={task}",
            "--set=features={item: {kind: id}, history: {kind: sequence}}",
            "--set=model.args={rows: {item: 10000000}, item: item, history: history, candidates: 10}",
        ]
        result = tmp_path / f"{drawn}.json"
        assert run(str(JOBS[0].parent / "sasrec.yaml"), *sets, "--dry-run", f"--json={result}") == 0
        keys[drawn] = json.loads(result.read_text())["unique_keys"]
    # The history of a sample has 1.5 items of the same table, and the candidates are 2 or 9.
    assert keys[1] < keys[8] < 3.5 * keys[1]


UNSERVED = """
from torch import nn

class Unserved(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(1000, 4)

    def forward(self, user):
        rows = self.user(user)
        return rows.sum(dim=1) if float(rows.sum()) < 1e9 else rows.mean(dim=1)
"""


@pytest.mark.parametrize("section", ["publish={root: MODELS}", "publish.local=MODELS"])
def test_a_model_that_cannot_be_served_is_refused_before_a_cluster_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr("sparserow.deploy.launch.local_cluster.start_local", lambda *_, **__: pytest.fail("a cluster"))
    module = f"unserved_{section[:4]}"
    (tmp_path / f"{module}.py").write_text(UNSERVED)
    monkeypatch.syspath_prepend(tmp_path)
    given = [
        *made_data(tmp_path, "din"),
        f"--set=model={{class: '{module}:Unserved', min_rows: 10}}",
        "--set=features={user: {kind: id, modulo: 1000}}",
    ]
    job = str(JOBS[0].parent / "din.yaml")
    serves = f"--set={section}".replace("MODELS", str(tmp_path / "models"))
    for options in (["--dry-run"], [], ["--set=train.workers=2"]):
        assert run(job, *given, serves, *options) == 1
        told = capsys.readouterr().err.replace("\n", " ")
        assert "publish: the model cannot be exported: " in told
        assert "leave publish out to train it all the same" in told
    assert not (tmp_path / "models").exists()
    assert run(job, *given, "--dry-run") == 0, capsys.readouterr().err


@pytest.mark.parametrize("job", ["din", "mmoe", "sasrec", "two_tower"])
def test_a_dry_run_exports_what_a_run_would_publish(tmp_path: Path, job: str) -> None:
    """Lists, several outputs, drawn negatives, and a model with another form for serving."""
    options = [*made_data(tmp_path, job), f"--set=publish={{root: {tmp_path / 'models'}}}"]
    assert run(str(JOBS[0].parent / f"{job}.yaml"), *options, "--dry-run") == 0
    assert not (tmp_path / "models").exists()
