"""Rules between the options of a job file: one table for validation, for docs/configuration.md and for the test.

A rule says what an option needs of the others to have an effect. Rules within one section, and rules about values, are
the section's own; where their option would be ignored, a line here shows them, without a check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import InvalidArgument
from .job_sections import JobSections
from .tasks_rules import tasks_of_job

# Whether a job breaks a rule; or the names of its options that do, where the rule stands for several.
Check: TypeAlias = Callable[[JobSections], bool | Iterable[str]]


@dataclass(frozen=True)
class Rule:
    """What an option needs.

    Attributes:
        option: the option, or the options of one kind.
        needs: what it needs; "no X" where X excludes it.
        because: the reason, which begins with as, where or which; "": it is plain.
        example: assignments of a job, or arguments of a command, that break the rule.
        is_broken: the check; None: the section or the command of the option has it.
        where: ``job`` for keys of a job file, otherwise the name of a command.
    """

    option: str
    needs: str
    because: str
    example: tuple[str, ...]
    is_broken: Check | None = None
    where: str = "job"

    def broken_by(self, job: JobSections) -> tuple[str, ...]:
        """Returns the names of the job's options that break the rule."""
        found: bool | Iterable[str] = False if self.is_broken is None else self.is_broken(job)
        return (() if not found else (self.option,)) if isinstance(found, bool) else tuple(found)


def check_rules(job: JobSections) -> None:
    """Refuses a job that breaks a rule, and names all of its options that need the same for the same reason.

    Raises:
        InvalidArgument: the text has the options, what they need, and why.
    """
    broken = [(rule, names) for rule in RULES if (names := rule.broken_by(job))]
    if not broken:
        return
    needs, because = broken[0][0].needs, broken[0][0].because
    alike = (names for rule, names in broken if (rule.needs, rule.because) == (needs, because))
    named = list(dict.fromkeys(name for names in alike for name in names))
    is_one = len(named) == 1
    verb = ("is" if is_one else "are") if needs.startswith("no ") else ("needs" if is_one else "need")
    must = f"not possible with {needs.removeprefix('no ')}" if needs.startswith("no ") else needs
    hints = [f"--set {each}" for each, name in _EMPTIED.items() if any(one.startswith(name) for one in named)]
    way = f" ({', '.join(hints)})" if hints and needs == _SERVERS else ""
    why = f", {because}" if because else ""
    raise InvalidArgument(f"{', '.join(named)}: {verb} {must}{why}; remove {'it' if is_one else 'them'}{way}")


# Options that a job file on top of which others are set cannot lose otherwise, by what takes them away.
_EMPTIED = {"cluster={}": "cluster.", "train.staleness=0": "train.staleness", "tables={}": "tables"}
_SERVERS, _NO_SERVERS = "model.backend ps", "as local has no servers"
_LOCAL = ("model.backend=local",)
_ELASTIC = ("train.dense=ps", "train.staleness=2", "train.elastic={}")
_STREAM = (
    "data={format: jsonl, test: t, stream: {kafka: {brokers: a:1, topics: [b]}, like: [c]}, columns: {label: y}}",
    "features={a: {kind: id}}",
)
_STREAM_NEGATIVES = "tasks={y: {loss: bpr, item: a, negatives: {kind: uniform, per_positive: 2}}}"
_QUORUM = ("train.dense=ps", "train.quorum=1")
_CHECKPOINT = "train.checkpoint={url: /c, every_steps: 1}"
_CSV = "data.format=csv"


def _of_servers(option: str, example: str, is_given: Callable[[JobSections], bool | Iterable[str]]) -> Rule:
    return Rule(
        option,
        _SERVERS,
        _NO_SERVERS,
        (*_LOCAL, example),
        lambda job: job.model.backend == "local" and is_given(job),
    )


def _without_meetings(option: str, because: str, example: tuple[str, ...], is_given: Check) -> Rule:
    return Rule(
        option,
        "train.dense ddp",
        because,
        ("train.dense=ps", *example),
        lambda job: job.train.dense == "ps" and is_given(job),
    )


def _set(job: JobSections, section: str, name: str) -> bool:
    """Whether the job file has the option."""
    return name in getattr(job, section).model_fields_set


def _of_stream(job: JobSections) -> bool:
    return job.data.stream is not None


def _has_event_times(job: JobSections) -> bool:
    return job.data.stream is not None and job.data.stream.event_time is not None


def _judged(job: JobSections) -> set[str]:
    return {task.judged_as for task in tasks_of_job(job)}


def _decoupled(job: JobSections) -> Iterable[str]:
    sections = {"train.row_optimizer": job.train.row_optimizer}
    sections.update({f"tables.{name}.optimizer": each.optimizer for name, each in job.tables.items() if each.optimizer})
    for section, rows in sections.items():
        if "decoupled" in rows.model_fields_set and rows.weight_decay == 0:
            yield f"{section}.decoupled"


RULES: tuple[Rule, ...] = (
    Rule(
        "data.columns",
        "data.format parquet, orc, arrow or jsonl",
        "",
        ("data.columns={label: a}",),
    ),
    Rule("data.csv", "data.format csv", "", ("data.csv={label: a}",)),
    Rule("data.where", "data.format parquet, orc, arrow or jsonl", "", ("data.where=a > 1",)),
    Rule(
        "data.negatives_keep",
        "a single task with loss bce",
        "as the logits of others cannot be corrected",
        ("data.negatives_keep=0.5", "tasks={label: {loss: mse}}"),
        lambda job: job.data.negatives_keep < 1 and [task.loss for task in tasks_of_job(job)] != ["bce"],
    ),
    Rule(
        "data.shuffle_rows above 0",
        "no train.elastic",
        "which shuffles lease_rows lines together",
        (*_ELASTIC, "data.shuffle_rows=9"),
        lambda job: job.train.elastic is not None and job.data.shuffle_rows != 0 and _set(job, "data", "shuffle_rows"),
    ),
    Rule(
        "data.stream",
        "train.elastic, or dense ddp with train.checkpoint",
        "as positions go on with the rows of a save",
        (*_STREAM,),
        lambda job: (
            _of_stream(job) and job.train.elastic is None and (job.train.dense != "ddp" or job.train.checkpoint is None)
        ),
    ),
    *(
        Rule(option, "no data.stream", because, (*_STREAM, *_ELASTIC, *example), is_given)
        for option, because, example, is_given in (
            (
                "data.negatives_keep",
                "as negatives are chosen by their places in files",
                ("data.negatives_keep=0.5",),
                lambda job: _of_stream(job) and job.data.negatives_keep < 1,
            ),
            (
                "data.where",
                "as rows of files are selected",
                ("data.where=a > 1",),
                lambda job: _of_stream(job) and job.data.where is not None,
            ),
            (
                "tasks.NAME.negatives",
                "as they are drawn by the places of samples in files",
                (_STREAM_NEGATIVES,),
                lambda job: (
                    [f"tasks.{name}.negatives" for name, task in job.tasks.items() if task.negatives is not None]
                    if _of_stream(job)
                    else ()
                ),
            ),
            (
                "train.prefetch",
                "which announces the batch of the next step alone",
                ("train.prefetch=2",),
                lambda job: _of_stream(job) and job.train.prefetch > 0,
            ),
            (
                "train.spike",
                "whose positions would go back with the rows",
                ("train.spike={factor: 3}",),
                lambda job: _of_stream(job) and job.train.spike is not None,
            ),
            (
                "train.parallel.tensor",
                "whose parts are leased to one process",
                ("train.parallel={tensor: 2}", "train.workers=2"),
                lambda job: _of_stream(job) and job.train.parallel is not None and job.train.parallel.tensor > 1,
            ),
            (
                "train.epochs",
                "which is read once",
                ("train.epochs=2",),
                lambda job: _of_stream(job) and _set(job, "train", "epochs"),
            ),
            (
                "train.elastic.lease_rows",
                "whose parts are leased as wholes",
                ("train.elastic.lease_rows=8",),
                lambda job: (
                    _of_stream(job)
                    and job.train.elastic is not None
                    and "lease_rows" in job.train.elastic.model_fields_set
                ),
            ),
        )
    ),
    Rule(
        "data.stream.event_time",
        "timestamp of data.csv or data.columns",
        "which says the time of each event",
        (*_STREAM, *_ELASTIC, "data.stream.event_time={}"),
        lambda job: _has_event_times(job) and job.data.samples.timestamp is None,
    ),
    Rule(
        "data.days",
        "train.checkpoint",
        "in whose folders each day begins with the day before",
        ("data={days: {path: 'd/{day}', first: 2026-11-01}}",),
        lambda job: job.data.days is not None and job.train.checkpoint is None,
    ),
    Rule(
        "timestamp of data.csv and data.columns",
        "data.stream.event_time, or metrics.progressive and metrics.file",
        "",
        (_CSV, "features={b: {kind: id}}", "data.csv={label: a, timestamp: t}"),
        lambda job: (
            (f"{job.data.samples.section}.timestamp",)
            if job.data.samples.timestamp is not None
            and (job.metrics.progressive is None or job.metrics.file is None)
            and not _has_event_times(job)
            else ()
        ),
    ),
    Rule(
        "group of data.csv and data.columns",
        "a task with loss bce or metrics bce",
        "as no others have a metric of groups",
        (_CSV, "features={b: {kind: id}}", "data.csv={label: a, group: g}", "tasks={a: {loss: mse}}"),
        lambda job: (
            (f"{job.data.samples.section}.group",)
            if job.data.samples.group is not None and "bce" not in _judged(job)
            else ()
        ),
    ),
    Rule("keys of cluster", "no cluster.address", "", ("cluster.address=a:1", "cluster.shards=1")),
    Rule("cluster.ssd_bytes", "cluster.ssd_path", "", ("cluster.ssd_bytes=1GiB",)),
    Rule("cluster.ssd_direct_io", "cluster.ssd_path", "", ("cluster.ssd_direct_io=true",)),
    Rule("cluster.ssd_engine", "cluster.ssd_path", "", ("cluster.ssd_engine=rocksdb",)),
    Rule("cluster.ssd_path", "cluster.memory_budget", "", ("cluster.ssd_path=/s",)),
    _of_servers(
        "keys of cluster",
        "cluster.shards=1",
        lambda job: [f"cluster.{name}" for name in sorted(job.cluster.model_fields_set)],
    ),
    _of_servers("train.staleness", "train.staleness=2", lambda job: job.train.staleness != 0),
    _of_servers("train.wire_dtype", "train.wire_dtype=bfloat16", lambda job: _set(job, "train", "wire_dtype")),
    _of_servers("train.transport", "train.transport=tcp", lambda job: _set(job, "train", "transport")),
    _of_servers("train.grad_scale", "train.grad_scale=sum", lambda job: _set(job, "train", "grad_scale")),
    _of_servers("train.prefetch", "train.prefetch=2", lambda job: job.train.prefetch > 0),
    _of_servers("train.cache", "train.cache.bytes=1MiB", lambda job: job.train.cache is not None),
    _of_servers("train.checkpoint", _CHECKPOINT, lambda job: job.train.checkpoint is not None),
    _of_servers("train.clip_row_norm", "train.clip_row_norm=1.0", lambda job: job.train.clip_row_norm is not None),
    _of_servers("train.dense", "train.dense=ps", lambda job: job.train.dense == "ps"),
    _of_servers("train.parallel", "train.parallel={shard: all}", lambda job: job.train.parts is not None),
    _of_servers("tables", "tables={a: {}}", lambda job: bool(job.tables)),
    _of_servers("publish", "publish.root=m", lambda job: job.publish.is_asked),
    _of_servers(
        "train.row_optimizer.kind",
        "train.row_optimizer={kind: ftrl}",
        lambda job: job.train.row_optimizer.kind == "ftrl",
    ),
    *(
        Rule(
            f"publish.{name}",
            "publish.root",
            "",
            (f"publish.{name}={value}",),
            lambda job, name=name: job.publish.root is None and _set(job, "publish", name),  # type: ignore[misc]
        )
        for name, value in (("model", "m"), ("alias", "best"), ("dtype", "int8"), ("sign", "rows"))
    ),
    Rule(
        "publish.every",
        "publish.root",
        "",
        ("publish.every=9min",),
        lambda job: job.publish.every is not None and job.publish.root is None,
    ),
    Rule(
        "publish.every",
        "no train.quorum",
        "as the worker that publishes would pass over the steps of that time",
        (*_QUORUM, "publish={root: m, every: 9min}"),
        lambda job: job.publish.every is not None and job.train.quorum is not None,
    ),
    *(
        Rule(
            f"publish.{name}",
            "publish.every",
            "",
            (f"publish={{root: m, {name}: {value}}}",),
            lambda job, name=name: job.publish.every is None and _set(job, "publish", name),  # type: ignore[misc]
        )
        for name, value in (("by", "clock"), ("least_pause", "9s"), ("keep", "3"))
    ),
    Rule(
        "publish.by event_time",
        "data.stream.event_time",
        "whose watermark it follows",
        ("publish={root: m, every: 9min, by: event_time}",),
        lambda job: job.publish.by == "event_time" and not _has_event_times(job),
    ),
    Rule(
        "publish.least_pause",
        "publish.by event_time",
        "as every is a time of the clock otherwise",
        ("publish={root: m, every: 9min, least_pause: 9s}",),
        lambda job: job.publish.by == "clock" and job.publish.every is not None and _set(job, "publish", "least_pause"),
    ),
    Rule(
        "train.namespace_policy",
        "cluster.address",
        "as a cluster of the job's own has no tables",
        ("train.namespace_policy=new",),
        lambda job: job.train.namespace_policy is not None and job.cluster.address is None,
    ),
    Rule(
        "train.features_policy",
        "cluster.address",
        "as a cluster of the job's own keeps no features",
        ("train.features_policy=refit",),
        lambda job: _set(job, "train", "features_policy") and job.cluster.address is None,
    ),
    Rule(
        "metrics.at",
        "a task over candidates",
        "",
        ("metrics.at=[5]",),
        lambda job: _set(job, "metrics", "at") and _judged(job) <= {"bce", "mse"},
    ),
    Rule(
        "metrics.max_groups",
        "a group of data.csv or data.columns",
        "",
        ("metrics.max_groups=5",),
        lambda job: _set(job, "metrics", "max_groups") and job.data.samples.group is None,
    ),
    Rule(
        "metrics.weighted",
        "a sample_weight of data.csv or data.columns",
        "",
        ("metrics.weighted=true",),
        lambda job: job.metrics.weighted and job.data.samples.sample_weight is None,
    ),
    Rule(
        "metrics.progressive",
        "metrics.file or metrics.tensorboard",
        "",
        ("metrics.progressive={}",),
        lambda job: (
            job.metrics.progressive is not None and job.metrics.file is None and job.metrics.tensorboard is None
        ),
    ),
    Rule(
        "metrics.progressive",
        "a task with loss bce or metrics bce",
        "",
        ("metrics.progressive={}", "metrics.file=m", "tasks={label: {loss: mse}}"),
        lambda job: job.metrics.progressive is not None and "bce" not in _judged(job),
    ),
    _without_meetings(
        "metrics.stop",
        "as the workers of ps do not meet",
        ("metrics.stop={metric: label.auc}",),
        lambda job: job.metrics.stop is not None,
    ),
    _without_meetings(
        "metrics.best",
        "as the workers of ps do not meet",
        ("metrics.best=label.auc", _CHECKPOINT),
        lambda job: job.metrics.best is not None,
    ),
    Rule(
        "metrics.best",
        "train.checkpoint",
        "which keeps the best model until the end",
        ("metrics.best=label.auc",),
        lambda job: job.metrics.best is not None and job.train.checkpoint is None,
    ),
    Rule(
        "metrics.best",
        "no train.cache",
        "whose rows a restore does not reach",
        ("metrics.best=label.auc", _CHECKPOINT, "train.staleness=4", "train.cache.bytes=1MiB"),
        lambda job: job.metrics.best is not None and job.train.cache is not None,
    ),
    Rule(
        "tasks.NAME.loss MODULE:FUNCTION",
        "tasks.NAME.metrics",
        "as a function names none",
        ("tasks={label: {loss: 'losses:focal'}}",),
    ),
    Rule(
        "tasks.NAME.metrics",
        "loss MODULE:FUNCTION",
        "as others have their own",
        ("tasks={label: {metrics: bce}}",),
    ),
    Rule("tasks.NAME.item", "loss in_batch_softmax, or negatives", "", ("tasks={label: {item: a}}",)),
    Rule(
        "train.checkpoint.delta_every",
        "train.staleness not 0",
        "as all processes restart together with 0",
        ("train.checkpoint={url: /c, every_steps: 1, delta_every: 9s}",),
        lambda job: (
            job.train.staleness == 0
            and job.train.checkpoint is not None
            and "delta_every" in job.train.checkpoint.model_fields_set
            and job.train.checkpoint.delta_every is not None
        ),
    ),
    Rule(
        "train.spike",
        "train.checkpoint",
        "which the job goes back to",
        ("train.spike={factor: 3}",),
        lambda job: job.train.spike is not None and job.train.checkpoint is None,
    ),
    Rule(
        "train.spike",
        "no train.cache",
        "whose rows a restore does not reach",
        ("train.spike={factor: 3}", _CHECKPOINT, "train.staleness=4", "train.cache.bytes=1MiB"),
        lambda job: job.train.spike is not None and job.train.cache is not None,
    ),
    Rule(
        "train.spike",
        "no train.prefetch",
        "whose rows a restore does not reach",
        ("train.spike={factor: 3}", _CHECKPOINT, "train.prefetch=2"),
        lambda job: job.train.spike is not None and job.train.prefetch > 0,
    ),
    _without_meetings(
        "train.spike",
        "as the workers of ps do not meet",
        ("train.spike={factor: 3}", _CHECKPOINT),
        lambda job: job.train.spike is not None,
    ),
    _without_meetings("train.device", "", ("train.device=cuda",), lambda job: job.train.device == "cuda"),
    _without_meetings("train.timeout", "", ("train.timeout=1h",), lambda job: _set(job, "train", "timeout")),
    _without_meetings(
        "train.find_unused_parameters",
        "",
        ("train.find_unused_parameters=true",),
        lambda job: job.train.find_unused_parameters,
    ),
    _without_meetings("train.clip_norm", "", ("train.clip_norm=1.0",), lambda job: job.train.clip_norm is not None),
    _without_meetings(
        "train.clip_row_norm", "", ("train.clip_row_norm=1.0",), lambda job: job.train.clip_row_norm is not None
    ),
    _without_meetings(
        "train.parallel",
        "as the tower of ps is on the servers",
        ("train.parallel={shard: all}",),
        lambda job: job.train.parallel is not None,
    ),
    _without_meetings(
        "tables.NAME.weights",
        "as workers of ps do not wait for each other: fill the table before (sparserow table import)",
        ("tables={a: {weights: w.parquet, frozen: true}}",),
        lambda job: [f"tables.{name}.weights" for name, table in job.tables.items() if table.weights is not None],
    ),
    Rule(
        "train.quorum",
        "train.dense ps",
        "as an allreduce waits for every worker",
        ("train.quorum=1",),
        lambda job: job.train.quorum is not None and job.train.dense != "ps",
    ),
    Rule(
        "train.quorum",
        "train.staleness 0",
        "as no step is reduced otherwise",
        (*_QUORUM, "train.staleness=2"),
        lambda job: job.train.quorum is not None and job.train.staleness != 0,
    ),
    Rule(
        "train.test_every",
        "no train.quorum",
        "as the worker that tests would pass over the steps of that time",
        (*_QUORUM, "train.test_every={steps: 5}"),
        lambda job: job.train.quorum is not None and job.train.test_every is not None,
    ),
    Rule(
        "train.prefetch",
        "no train.quorum",
        "as a worker may pass over batches",
        (*_QUORUM, "train.prefetch=2"),
        lambda job: job.train.quorum is not None and job.train.prefetch > 0,
    ),
    Rule(
        "train.elastic",
        "no train.quorum",
        "as its leases need staleness",
        (*_QUORUM, "train.elastic={}"),
        lambda job: job.train.quorum is not None and job.train.elastic is not None,
    ),
    Rule(
        "train.checkpoint.every_seconds",
        "no train.quorum",
        "as all workers save after the same step (every_steps)",
        (*_QUORUM, "train.checkpoint={url: /c, every_seconds: 9s}"),
        lambda job: (
            job.train.quorum is not None
            and job.train.checkpoint is not None
            and job.train.checkpoint.every_seconds is not None
        ),
    ),
    Rule(
        "train.elastic",
        "train.dense ps",
        "where workers do not wait for each other",
        ("train.elastic={}",),
        lambda job: job.train.elastic is not None and job.train.dense != "ps",
    ),
    Rule(
        "train.elastic",
        "train.staleness not 0",
        "as all workers restart together with 0",
        ("train.dense=ps", "train.elastic={}"),
        lambda job: job.train.elastic is not None and job.train.staleness == 0,
    ),
    Rule(
        "train.prefetch",
        "no train.elastic",
        "as leases are of lines that are not read yet",
        (*_ELASTIC, "train.prefetch=2"),
        lambda job: job.train.elastic is not None and job.train.prefetch > 0,
    ),
    Rule(
        "train.checkpoint",
        "no train.elastic",
        "which has url",
        (*_ELASTIC, _CHECKPOINT),
        lambda job: job.train.elastic is not None and job.train.checkpoint is not None,
    ),
    Rule(
        "train.elastic.save_every",
        "train.elastic.url",
        "where rows are saved",
        ("train.dense=ps", "train.staleness=2", "train.elastic.save_every=5s"),
        lambda job: (
            job.train.elastic is not None
            and job.train.elastic.url is None
            and "save_every" in job.train.elastic.model_fields_set
        ),
    ),
    Rule(
        "train.find_unused_parameters",
        "no train.parallel that has parts of the tower",
        "as it is an option of DDP",
        ("train.parallel={shard: all}", "train.find_unused_parameters=true"),
        lambda job: job.train.parts is not None and job.train.find_unused_parameters,
    ),
    Rule(
        "train.parallel.shard",
        "2 groups of train.parallel.tensor processes",
        "",
        ("train.workers=2", "train.parallel={shard: all, tensor: 2}"),
    ),
    Rule(
        "train.metrics_host",
        "train.metrics_port",
        "",
        ("train.metrics_host=0.0.0.0",),
        lambda job: job.train.metrics_port is None and _set(job, "train", "metrics_host"),
    ),
    Rule(
        "train.prefetch_hints",
        "cluster.ssd_path, or cluster.address",
        "as shards without an SSD read nothing",
        ("train.prefetch=2", "train.prefetch_hints=2"),
        lambda job: job.train.prefetch_hints > 0 and job.cluster.address is None and job.cluster.ssd_path is None,
    ),
    Rule(
        "train.prefetch_hints",
        "train.prefetch",
        "",
        ("cluster={ssd_path: /s, memory_budget: 1GiB}", "train.prefetch_hints=2"),
        lambda job: job.train.prefetch_hints > 0 and job.train.prefetch == 0,
    ),
    Rule(
        "train.row_optimizer.decoupled",
        "weight_decay",
        "",
        ("train.row_optimizer={kind: sgd, decoupled: true}",),
        _decoupled,
    ),
    Rule(
        "train.row_optimizer.dampening",
        "train.row_optimizer.momentum",
        "",
        ("train.row_optimizer={kind: sgd, dampening: 0.1}",),
    ),
    Rule(
        "train.row_optimizer.nesterov",
        "train.row_optimizer.momentum",
        "",
        ("train.row_optimizer={kind: sgd, nesterov: true}",),
    ),
)
