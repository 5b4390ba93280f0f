"""The schema of a job: what is refused, in which words, and that the shipped job files are valid."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sparserow.deploy.train.training_job import TorchrunPlace, allowed_restarts, run_job
from sparserow.proto.config.elastic_config import ElasticConfig
from sparserow.proto.config.job import JobConfig
from sparserow.proto.config.placement_rules import refusal_of_devices
from sparserow.proto.config.quorum_rules import check_members
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.optim import OPTIMIZERS, SGD, Adagrad, Adam, AdamW
from sparserow.proto.options.document import load_config, validate
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.coordinator.state.registry import first_difference

BASE = [
    "data.train=a.tsv",
    "data.test=[b.tsv, c.tsv]",
    "model={class: DLRM, args: {rows: {'*': 1000000}}}",
]
TABLE = TableSchema("n", "t", 4, SGD())
JOBS = Path(__file__).resolve().parents[4] / "deploy" / "jobs"


def test_shipped_jobs_are_valid_and_survive_a_round_trip():
    wrong = []
    for path in sorted(JOBS.glob("*.yaml")):
        try:
            job = load_config(JobConfig, path)
            if validate(JobConfig, job.model_dump(mode="json", exclude_unset=True)) != job:
                wrong.append(f"{path.name}: it is another job after a round trip")
        except Exception as error:  # of any kind: each file is told with what is wrong in it
            wrong.append(f"{path.name}: {type(error).__name__}: {error}")
    assert len(list(JOBS.glob("*.yaml"))) > 10
    assert not wrong, "\n".join(wrong)


def test_defaults():
    job = load_config(JobConfig, None, BASE)
    assert job.data.train == ("a.tsv",)
    assert job.data.test == ("b.tsv", "c.tsv")
    assert (job.train.staleness, job.cluster.shards, job.model.backend) == (0, 2, "ps")
    assert load_config(JobConfig, None, [*BASE, "train.staleness=null"]).train.staleness is None


def test_a_run_begins_again_as_often_as_its_section_says():
    elastic = ["train.dense=ps", "train.staleness=1", "train.elastic.url=/e", "train.elastic.max_restarts=5"]
    assert allowed_restarts(load_config(JobConfig, None, [*BASE, *elastic]), "auto") == 5
    saved = load_config(
        JobConfig,
        None,
        [*BASE, "train.checkpoint.url=/c", "train.checkpoint.every_steps=9", "train.checkpoint.max_restarts=7"],
    )
    assert allowed_restarts(saved, "auto") == 7
    assert allowed_restarts(saved, "save-000003") == allowed_restarts(load_config(JobConfig, None, BASE), "auto") == 0


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.kind=dlrm", "model.kind: unknown key; known keys: class, args"),
        ("model.class=a b", "model.class: 'a b' is not allowed; allowed: MODULE:CLASS, or the name of a model"),
        ("model.args=[3]", "model.args: .* is not allowed; allowed: a mapping of names to values"),
        ("model.min_rows=0", "model.min_rows: 0 is not allowed"),
        ("model.backend=gpu", "model.backend: 'gpu' is not allowed; allowed: ps, local"),
        ("train.epoch=2", "train.epoch: unknown key; did you mean 'epochs'"),
        ("train.epochs=1.5", "train.epochs: 1.5 is not allowed; allowed: an integer"),
        ("train.staleness=-1", "train.staleness: -1 is not allowed"),
        ("train.workers=0", "train.workers: 0 is not allowed"),
        ("train.schedule={kind: step, every_epochs: 0}", "every_epochs: 0 is not allowed"),
        ("train.schedule={kind: step}", "allowed: one of every_steps and every_epochs"),
        ("train.schedule={kind: step, every_steps: 9, every_epochs: 1}", "one of every_steps and every_epochs"),
        ("train.lr_decay=0.5", "train.lr_decay"),
        ("train.accumulate=0", "train.accumulate: 0 is not allowed"),
        ("train.amp=float8", "train.amp: 'float8' is not allowed; allowed: none, bfloat16, float16"),
        ("train.parallel={shard: 1}", "train.parallel.shard: 1 is not allowed"),
        ("train.clip_norm=0", "train.clip_norm: 0 is not allowed"),
        ("train.clip_row_norm=-1", "train.clip_row_norm: -1 is not allowed"),
        ("train.on_nonfinite=ignore", "train.on_nonfinite: 'ignore' is not allowed; allowed: raise, skip"),
        ("train.schedule={kind: poly}", "train.schedule.kind: 'poly' is not allowed; allowed: "),
        ("train.schedule={kind: cosine}", "train.schedule.total_steps: "),
        ("train.schedule={kind: step, every_steps: 0}", "train.schedule.every_steps: 0 is not allowed"),
        ("train.schedule={kind: constant, total_steps: 3}", "train.schedule.total_steps: unknown key"),
        (
            "train.dense_optimizer={kind: lion}",
            "train.dense_optimizer.kind: 'lion' is not allowed; allowed: adam, adamw",
        ),
        (
            "train.row_optimizer={kind: adamax}",
            "train.row_optimizer.kind: 'adamax' is not allowed; allowed: adadelta, adagrad, adam, ftrl, lamb, lion, ",
        ),
        (
            "train.row_optimizer={kind: adam, momentum: 0.9}",
            "train.row_optimizer.momentum: unknown key; known keys: kind, lr, weight_decay, decoupled, betas, ",
        ),
        ("train.row_optimizer={kind: rmsprop, alpha: 1}", "train.row_optimizer.alpha: 1 is not allowed"),
        ("train.row_optimizer={kind: ftrl, beta: 0}", "train.row_optimizer.beta: 0 is not allowed"),
        ("train.row_optimizer={kind: ftrl, l1: -1}", "train.row_optimizer.l1: -1 is not allowed"),
        (
            "train.row_optimizer={kind: adagrad, accumulator_decay: 0}",
            "train.row_optimizer.accumulator_decay: 0 is not allowed",
        ),
        ("data.on_bad_line=log", "data.on_bad_line: 'log' is not allowed; allowed: error, skip"),
        ("data.train=''", "data.train.0: '' is empty; expected the name of a place"),
        ("data.test=[a, ' ']", "data.test.1: ' ' is empty; expected the name of a place"),
        ("publish.local=' '", "publish.local: ' ' is empty; expected the name of a place"),
        ("cluster.address=''", "cluster.address: '' is empty; expected the name of a place"),
        ("data.train=[]", "data.train: .* is not allowed; allowed: a path or URL, or a sequence of them"),
        ("data.format=avro", "data.format: 'avro' is not allowed; allowed: criteo, csv, parquet, orc, arrow, jsonl"),
        ("data.format=parquet", "data: format parquet needs a section columns"),
        ("data.columns={label: y}", "data: format criteo has no use for a section columns"),
        ("data.where=a > 1", "data: where: needs format parquet, orc, arrow, jsonl; format is criteo"),
        ("name=a/b", "name: 'a/b' is not allowed; allowed: 1-255 of letters"),
        ("cluster.shards=0", "cluster.shards: 0 is not allowed"),
    ],
)
def test_refusals(assignment, message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        load_config(JobConfig, None, [*BASE, assignment])
    assert "\n" not in str(caught.value)


def test_local_backend_has_no_ftrl():
    sets = [*BASE, "train.row_optimizer={kind: ftrl}"]
    load_config(JobConfig, None, sets)
    words = r"train\.row_optimizer\.kind: needs model\.backend ps, as local has no servers"
    with pytest.raises(InvalidArgument, match=words):
        load_config(JobConfig, None, [*sets, "model.backend=local"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("dampening: 0.5", r"dampening: has no effect without momentum"),
        ("nesterov: true", r"nesterov: needs momentum > 0 and dampening = 0"),
        ("momentum: 0.9, dampening: 0.5, nesterov: true", r"nesterov: needs momentum > 0 and dampening = 0"),
    ],
)
def test_options_of_momentum_that_do_not_fit(options, message):
    with pytest.raises(InvalidArgument, match=message):
        load_config(JobConfig, None, [*BASE, f"train.row_optimizer={{kind: sgd, {options}}}"])


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("train.metrics_host=0.0.0.0",), r"train\.metrics_host: needs train\.metrics_port; remove it"),
        (
            ("train.prefetch=1", "train.prefetch_hints=2"),
            r"train\.prefetch_hints: needs cluster\.ssd_path, or cluster\.address",
        ),
        (("train.prefetch=2", "model.backend=local"), r"train\.prefetch: needs model\.backend ps"),
        (
            ("train.prefetch=4", "train.staleness=3", "train.cache.bytes=1MiB"),
            r"train\.prefetch: 4 is not allowed with train\.cache and train\.staleness 3; allowed: 0 to 3",
        ),
        (("train.prefetch=1", "train.cache.bytes=1MiB"), r"train\.prefetch: 1 is not allowed .* allowed: 0 to 0"),
        (("train.prefetch=65",), r"train\.prefetch: 65 is not allowed"),
    ],
)
def test_prefetch_is_within_the_staleness(assignments, message):
    with pytest.raises(InvalidArgument, match=message):
        load_config(JobConfig, None, [*BASE, *assignments])


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ((), r"train\.quorum: needs train\.dense ps, as an allreduce waits for every worker"),
        (("train.dense=ps", "train.staleness=3"), r"train\.quorum: needs train\.staleness 0, as no step"),
        (("train.dense=ps", "train.staleness=null"), r"train\.quorum: needs train\.staleness 0, as no step"),
        (("train.dense=ps", "train.prefetch=2"), r"train\.prefetch: is not possible with train\.quorum, as a worker"),
        (("train.dense=ps", "train.elastic={}"), r"train\.elastic: is not possible with train\.quorum"),
        (
            ("train.dense=ps", "train.checkpoint={url: /c, every_seconds: 9s}"),
            r"train\.checkpoint\.every_seconds: is not possible with train\.quorum, as all workers save after the same",
        ),
        (("train.dense=ps", "train.quorum=0"), r"train\.quorum: 0 is not allowed"),
    ],
)
def test_a_quorum_needs_that_nobody_waits_for_all(assignments, message):
    with pytest.raises(InvalidArgument, match=message):
        load_config(JobConfig, None, [*BASE, "train.quorum=2", *assignments])


def test_a_quorum_has_no_more_members_than_the_job_has_workers():
    job = load_config(JobConfig, None, [*BASE, "train.dense=ps", "train.quorum=2"])
    check_members(job.train, 2)
    with pytest.raises(InvalidArgument, match=r"train\.quorum: 2 is not allowed; allowed: 1 to 1 \(the workers of"):
        check_members(job.train, 1)


def test_all_that_needs_servers_is_named_at_once() -> None:
    """Each used to be refused alone, so that a job with ten of them was started ten times."""
    options = {
        "cluster.shards": "cluster.shards=2",
        "train.staleness": "train.staleness=2",
        "train.wire_dtype": "train.wire_dtype=float16",
        "train.transport": "train.transport=tcp",
        "train.grad_scale": "train.grad_scale=sum",
        "train.prefetch": "train.prefetch=1",
        "train.cache": "train.cache.bytes=1MiB",
        "train.checkpoint": "train.checkpoint={url: c, every_steps: 5}",
        "train.clip_row_norm": "train.clip_row_norm=1",
        "train.dense": "train.dense=ps",
        "train.parallel": "train.parallel={tensor: 2}",
        "tables": "tables={a: {}}",
        "publish": "publish.root=m",
    }
    base = [
        "data.train=a",
        "data.test=b",
        "model={class: DLRM, args: {rows: {'*': 1000000}}}",
        "model.backend=local",
    ]
    words = f"{', '.join(options)}: need model.backend ps, as local has no servers; remove them (--set cluster={{}}, "
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        load_config(JobConfig, None, [*base, *options.values()])
    for name, option in options.items():
        with pytest.raises(InvalidArgument, match=re.escape(f"{name}: needs model.backend ps")):
            load_config(JobConfig, None, [*base, option])
    load_config(JobConfig, None, base)


TENSOR = "train.parallel={tensor: 2}"


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ("train.parallel={}",),
            r"train\.parallel: has no effect with shard null and tensor 1; allowed: shard optimizer or all",
        ),
        (("train.parallel={pipeline: 2}",), r"train\.parallel: pipeline: pipeline parallelism is not possible, as its"),
        (("train.parallel={tensor: 0}",), r"train\.parallel\.tensor: 0 is not allowed"),
        ((TENSOR, "model.backend=local"), r"train\.parallel: needs model\.backend ps"),
        ((TENSOR, "train.dense=ps"), r"train\.parallel: needs train\.dense ddp"),
        (
            (TENSOR, "train.elastic={}", "train.dense=ps", "train.staleness=1"),
            r"train\.parallel: needs train\.dense ddp",
        ),
        ((TENSOR, "train.elastic={}"), r"train\.elastic: needs train\.dense ps"),
        (
            ("train.parallel={tensor: 2, shard: optimizer}",),
            r"train\.parallel: shard: optimizer is not possible with tensor",
        ),
        ((TENSOR, "train.workers=1"), r"train\.parallel: needs at least 2 processes; this job has 1"),
        ((TENSOR, "train.workers=5"), r"train\.parallel\.tensor: 2 is not allowed; allowed: divisors of 5 .*: 1, 5"),
        (
            ("train.parallel={tensor: 2, shard: all}", "train.workers=2"),
            r"train\.parallel\.shard: has no effect with one group of 2 processes",
        ),
    ],
)
def test_towers_in_parts_that_are_refused(assignments, message):
    with pytest.raises(InvalidArgument, match=message):
        load_config(JobConfig, None, [*BASE, *assignments])


@pytest.mark.parametrize(
    ("parallel", "workers"), [("{shard: all}", 3), ("{tensor: 2}", 2), ("{shard: all, tensor: 2}", 4)]
)
def test_towers_in_parts_that_are_allowed(parallel, workers):
    sets = [f"train.parallel={parallel}", f"train.workers={workers}", "train.amp=bfloat16"]
    for device, is_on_host in (("auto", True), ("cpu", True), ("cuda", False)):
        train = load_config(JobConfig, None, [*BASE, *sets, f"train.device={device}"]).train
        assert train.parallel is not None
        assert train.is_on_host == is_on_host


def test_an_optimizer_whose_state_is_spread_is_for_every_model_on_any_device() -> None:
    own = ["model={class: 'models:Net'}", "train.find_unused_parameters=true"]
    for sets in ([], own):
        train = load_config(
            JobConfig, None, [*BASE, *sets, "train.parallel={shard: optimizer}", "train.workers=2"]
        ).train
        assert (train.parts, train.is_on_host) == (None, False)


def test_a_single_process_is_refused_before_anything_is_started():
    with pytest.raises(InvalidArgument, match=r"train\.parallel: needs at least 2 processes"):
        run_job(load_config(JobConfig, None, [*BASE, TENSOR]))
    place = TorchrunPlace(rank=0, world=3, local_world=3)
    with pytest.raises(InvalidArgument, match=r"train\.parallel\.tensor: 2 is not allowed; allowed: divisors of 3"):
        run_job(load_config(JobConfig, None, [*BASE, TENSOR]), place)


@pytest.mark.parametrize(
    "assignments",
    [
        ("train.prefetch=4",),
        ("train.prefetch=3", "train.staleness=3"),
        ("train.prefetch=4", "train.staleness=3"),
        ("train.prefetch=4", "train.staleness=null"),
    ],
)
def test_prefetch_that_is_allowed(assignments):
    assert load_config(JobConfig, None, [*BASE, *assignments]).train.prefetch >= 3


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_row_optimizers_have_the_defaults_of_their_schema(kind):
    job = load_config(JobConfig, None, [*BASE, f"train.row_optimizer={{kind: {kind}}}"])
    made, schema = job.train.row_optimizer.row_optimizer(), OPTIMIZERS[kind]()
    assert first_difference(replace(TABLE, optimizer=made), replace(TABLE, optimizer=schema)) is None


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("adam", Adam(0.5, weight_decay=0.1)),
        ("adamw", AdamW(0.5, weight_decay=0.1)),
        ("adagrad", Adagrad(0.5, weight_decay=0.1)),
        ("sgd", SGD(0.5, weight_decay=0.1)),
    ],
)
def test_a_dense_tower_on_servers_has_the_same_optimizer(kind, wanted):
    section = f"train.dense_optimizer={{kind: {kind}, lr: 0.5, weight_decay: 0.1}}"
    job = load_config(JobConfig, None, [*BASE, "train.dense=ps", section])
    assert job.train.dense_optimizer.row_optimizer() == wanted


def test_ftrl_on_devices_is_refused_by_name():
    ftrl = "train.row_optimizer={kind: ftrl}"
    with pytest.raises(InvalidArgument, match=r"placement: 'device' .*servers with optimizer ftrl"):
        load_config(JobConfig, None, [*BASE, ftrl, "tables={a: {placement: device}}"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_row_optimizers_reach_the_table_schema(kind):
    job = load_config(JobConfig, None, [*BASE, f"train.row_optimizer={{kind: {kind}, lr: 0.25}}"])
    made = job.train.row_optimizer.row_optimizer()
    assert type(made).__name__.lower() == kind.replace("_", "")
    assert made.lr == 0.25


PLACED = "tables={a: {placement: device}}"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("train.staleness=2",), "servers with train.staleness 2"),
        (("train.staleness=null",), "servers with train.staleness null"),
        (("train.dense=ps",), "servers with train.dense ps"),
        (("train.dense=ps", "train.staleness=2", "train.elastic={}"), "servers with train.staleness 2"),
        (("train.parallel={shard: all}", "train.workers=2"), "servers with train.parallel"),
        (("tables.a.admit_after=3",), "servers with rules of admission, eviction or memory"),
        (("tables.a.max_rows=9",), "servers with rules of admission, eviction or memory"),
    ],
)
def test_tables_on_devices_are_refused_by_name(settings: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"tables\.a\.placement: 'device' is not allowed; allowed: {text}"):
        load_config(JobConfig, None, [*BASE, PLACED, *settings])
    placed = load_config(JobConfig, None, [*BASE, "tables={a: {placement: auto}}", *settings])
    assert refusal_of_devices(placed, placed.tables["a"]) is not None


def test_elastic_workers_have_no_tables_on_devices() -> None:
    placed = load_config(JobConfig, None, [*BASE, PLACED])
    assert refusal_of_devices(placed, placed.tables["a"]) is None
    elastic = placed.train.model_copy(update={"elastic": ElasticConfig()})
    assert refusal_of_devices(placed.model_copy(update={"train": elastic}), placed.tables["a"]) == "train.elastic"


@pytest.mark.parametrize("name", ["model=m", "alias=live", "dtype=int8", "sign=rows"])
def test_what_a_published_version_has_needs_a_root(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"publish\.\w+: needs publish\.root; remove it"):
        load_config(JobConfig, None, [*BASE, f"publish.{name}"])
    load_config(JobConfig, None, [*BASE, f"publish.{name}", "publish.root=models"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_job_file_and_a_script_have_the_same_defaults(kind: str) -> None:
    job = load_config(JobConfig, None, [*BASE, f"train.row_optimizer={{kind: {kind}}}"])
    assert job.train.row_optimizer.row_optimizer() == OPTIMIZERS[kind]()
