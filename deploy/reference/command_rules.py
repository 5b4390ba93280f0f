"""The table of options that have an effect only beside other options; docs/configuration.md shows it.

Each line has an example that gives the option without the others. A test runs all examples: the error names the option.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptionEffect:
    """One option, or several options of one kind.

    Attributes:
        where: ``job`` for keys of a job file, otherwise the name of a command.
        option: the option as it is written.
        beside: what it needs to have an effect.
        example: assignments of a job, or arguments of the command, with which it would have no effect.
    """

    where: str
    option: str
    beside: str
    example: tuple[str, ...]


_LOCAL = ("model.backend=local",)
_PREDICT = ("--model", "m", "--root", "r", "--input", "rows.parquet")
_ELASTIC = ("train.dense=ps", "train.staleness=2")

OPTION_EFFECTS: tuple[OptionEffect, ...] = (
    OptionEffect(
        "job",
        "data.columns",
        "data.format parquet, orc, arrow or jsonl",
        ("data.columns={label: a, categorical: [b]}",),
    ),
    OptionEffect("job", "data.csv", "data.format csv", ("data.csv={label: a, categorical: [b]}",)),
    OptionEffect(
        "job", "data.shuffle_rows above 0", "no train.elastic", (*_ELASTIC, "train.elastic={}", "data.shuffle_rows=9")
    ),
    OptionEffect(
        "job",
        "timestamp of data.csv and data.columns",
        "metrics.progressive and metrics.file",
        ("data.format=csv", "data.csv={label: a, categorical: [b], timestamp: t}"),
    ),
    OptionEffect("job", "data.where", "data.format parquet, orc, arrow or jsonl", ("data.where=a > 1",)),
    OptionEffect("job", "keys of cluster", "no cluster.address", ("cluster.address=a:1", "cluster.shards=1")),
    OptionEffect("job", "keys of cluster", "model.backend ps", (*_LOCAL, "cluster.shards=1")),
    OptionEffect("job", "cluster.ssd_bytes", "cluster.ssd_path", ("cluster.ssd_bytes=1GiB",)),
    OptionEffect("job", "cluster.ssd_direct_io", "cluster.ssd_path", ("cluster.ssd_direct_io=true",)),
    OptionEffect("job", "cluster.ssd_engine", "cluster.ssd_path", ("cluster.ssd_engine=rocksdb",)),
    OptionEffect("job", "cluster.ssd_path", "cluster.memory_budget", ("cluster.ssd_path=/s",)),
    OptionEffect("job", "model.min_rows above 1", "model.backend ps", (*_LOCAL, "model.min_rows=5")),
    OptionEffect("job", "publish", "model.backend ps", (*_LOCAL, "publish.root=m")),
    OptionEffect("job", "tables", "model.backend ps", (*_LOCAL, "tables={a: {}}")),
    OptionEffect("job", "train.grad_scale", "model.backend ps", (*_LOCAL, "train.grad_scale=sum")),
    OptionEffect("job", "train.namespace_policy", "cluster.address", ("train.namespace_policy=new",)),
    OptionEffect("job", "train.features_policy", "cluster.address", ("train.features_policy=refit",)),
    OptionEffect("job", "train.wire_dtype", "model.backend ps", (*_LOCAL, "train.wire_dtype=bfloat16")),
    OptionEffect("job", "metrics.progressive", "metrics.file or metrics.tensorboard", ("metrics.progressive={}",)),
    OptionEffect("job", "metrics.at", "a task over candidates", ("metrics.at=[5]",)),
    OptionEffect("job", "metrics.best", "train.checkpoint", ("metrics.best=label.auc",)),
    OptionEffect("job", "metrics.max_groups", "data.columns.group", ("metrics.max_groups=5",)),
    OptionEffect("job", "metrics.weighted", "data.columns.sample_weight", ("metrics.weighted=true",)),
    OptionEffect("job", "tasks.NAME.item", "loss in_batch_softmax, or negatives", ("tasks={label: {item: a}}",)),
    OptionEffect("job", "train.cache", "model.backend ps", (*_LOCAL, "train.cache.bytes=1MiB")),
    OptionEffect(
        "job", "train.checkpoint", "model.backend ps", (*_LOCAL, "train.checkpoint={url: /c, every_steps: 1}")
    ),
    OptionEffect(
        "job",
        "train.checkpoint.delta_every",
        "train.staleness not 0",
        ("train.checkpoint={url: /c, every_steps: 1, delta_every: 9s}",),
    ),
    OptionEffect("job", "train.clip_norm", "train.dense ddp", ("train.dense=ps", "train.clip_norm=1.0")),
    OptionEffect("job", "train.clip_row_norm", "train.dense ddp", ("train.dense=ps", "train.clip_row_norm=1.0")),
    OptionEffect("job", "train.clip_row_norm", "model.backend ps", (*_LOCAL, "train.clip_row_norm=1.0")),
    OptionEffect("job", "train.elastic", "train.dense ps", ("train.elastic={}",)),
    OptionEffect("job", "train.elastic.save_every", "train.elastic.url", (*_ELASTIC, "train.elastic.save_every=5s")),
    OptionEffect(
        "job",
        "train.find_unused_parameters",
        "train.dense ddp, and 2 workers",
        ("train.dense=ps", "train.find_unused_parameters=true"),
    ),
    OptionEffect(
        "job",
        "train.find_unused_parameters",
        "no process with a part of the tower (train.parallel)",
        ("train.parallel={shard: all}", "train.find_unused_parameters=true"),
    ),
    OptionEffect("job", "train.metrics_host", "train.metrics_port", ("train.metrics_host=0.0.0.0",)),
    OptionEffect(
        "job",
        "train.parallel",
        "train.dense ddp, and 2 processes",
        ("train.parallel={shard: all}", "train.dense=ps"),
    ),
    OptionEffect("job", "train.parallel", "model.backend ps", (*_LOCAL, "train.parallel={shard: all}")),
    OptionEffect(
        "job",
        "train.parallel.shard",
        "2 groups of train.parallel.tensor processes",
        ("train.workers=2", "train.parallel={shard: all, tensor: 2}"),
    ),
    OptionEffect("job", "train.prefetch", "model.backend ps", (*_LOCAL, "train.prefetch=2")),
    OptionEffect("job", "train.quorum", "train.dense ps", ("train.quorum=1",)),
    OptionEffect("job", "train.quorum", "train.staleness 0", ("train.dense=ps", "train.staleness=2", "train.quorum=1")),
    OptionEffect(
        "job",
        "train.prefetch_hints",
        "train.prefetch",
        ("cluster={ssd_path: /s, memory_budget: 1GiB}", "train.prefetch_hints=2"),
    ),
    OptionEffect(
        "job",
        "train.prefetch_hints",
        "cluster.ssd_path; of a running cluster, an SSD of its shards",
        ("train.prefetch=2", "train.prefetch_hints=2"),
    ),
    OptionEffect(
        "job",
        "train.row_optimizer.dampening",
        "train.row_optimizer.momentum",
        ("train.row_optimizer={kind: sgd, dampening: 0.1}",),
    ),
    OptionEffect(
        "job",
        "train.row_optimizer.decoupled",
        "train.row_optimizer.weight_decay",
        ("train.row_optimizer={kind: sgd, decoupled: true}",),
    ),
    OptionEffect(
        "job",
        "train.row_optimizer.nesterov",
        "train.row_optimizer.momentum",
        ("train.row_optimizer={kind: sgd, nesterov: true}",),
    ),
    OptionEffect("job", "train.staleness not 0", "model.backend ps", (*_LOCAL, "train.staleness=2")),
    OptionEffect("job", "train.timeout", "train.dense ddp", ("train.dense=ps", "train.timeout=1h")),
    OptionEffect("doctor", "--disk-bytes", "--disk", ("--disk-bytes", "5GiB")),
    OptionEffect(
        "doctor",
        "--job, --coordinator, --listen, --host, --disk-bytes, --memory-budget",
        "no --nodes",
        ("--nodes", "--memory-budget", "5GiB"),
    ),
    OptionEffect("doctor", "--nodes", "torchrun or Ray", ("--nodes",)),
    OptionEffect("doctor", "--slower-than", "--nodes", ("--slower-than", "3")),
    OptionEffect("doctor", "--timeout", "--nodes", ("--timeout", "30s")),
    OptionEffect("inspect", "--key", "--table", ("FOLDER", "--key", "5")),
    OptionEffect("inspect", "--table", "--key", ("FOLDER", "--table", "a/b")),
    OptionEffect(
        "predict",
        "--delimiter, --list-delimiter, --quote, --comment, --trim, --header, --columns, --missing",
        "--input of CSV",
        (*_PREDICT, "--delimiter", ";"),
    ),
    OptionEffect("predict", "--keep, --only", "an --output that ends in .parquet", (*_PREDICT, "--keep", "a")),
    OptionEffect("ps", "--ssd-direct-io", "--ssd-path", ("--coordinator", "a:1", "--shard", "0", "--ssd-direct-io")),
    OptionEffect("ps", "--ssd-engine", "--ssd-path", ("--coordinator", "a:1", "--shard", "0", "--ssd-engine", "pages")),
    OptionEffect("ps", "--ssd-bytes", "--ssd-path", ("--coordinator", "a:1", "--shard", "0", "--ssd-bytes", "1GiB")),
    OptionEffect("publish", "--features", "--program", ("m", "--root", "r", "--namespace", "n", "--features", "f")),
    OptionEffect(
        "publish",
        "--sign",
        "signing_key of the security file",
        ("m", "--root", "r", "--namespace", "n", "--sign", "rows"),
    ),
    OptionEffect("row", "--model", "--serving", ("a/t", "5", "--model", "m")),
    OptionEffect("serve", "--namespace", "no --root", ("--model", "m", "--root", "r", "--namespace", "n")),
    OptionEffect("serve", "--ssd-direct-io", "--ssd-path", ("--model", "m", "--root", "r", "--ssd-direct-io")),
    OptionEffect("serve", "--ssd-engine", "--ssd-path", ("--model", "m", "--root", "r", "--ssd-engine", "pages")),
    OptionEffect("serve", "--ssd-path", "--memory-budget", ("--model", "m", "--root", "r", "--ssd-path", "s")),
    OptionEffect(
        "serve",
        "--sync-after-updates, --sync-after-move",
        "--follow",
        ("--model", "m", "--root", "r", "--sync-after-updates", "5"),
    ),
    OptionEffect(
        "serve",
        "--sync-max-delay",
        "--sync-after-updates or --sync-after-move",
        ("--model", "m", "--root", "r", "--follow", "a:1", "--sync-max-delay", "9s"),
    ),
    OptionEffect("serve", "--sync-interval", "--follow", ("--model", "m", "--root", "r", "--sync-interval", "5s")),
    OptionEffect("status", "--over", "no --faults", ("--faults", "--over", "3s")),
    OptionEffect("status", "--serving", "no --faults", ("--faults", "--serving", "a:1")),
    OptionEffect(
        "train",
        "--overwrite-checkpoints",
        "--resume never",
        ("JOB", "--resume", "auto", "--overwrite-checkpoints", "--set", "train.checkpoint={url: /c, every_steps: 1}"),
    ),
    OptionEffect(
        "train", "--overwrite-checkpoints", "train.checkpoint, or train.elastic.url", ("JOB", "--overwrite-checkpoints")
    ),
    OptionEffect("train", "train.node_check", "torchrun or Ray", ("JOB", "--set", "train.node_check={}")),
    OptionEffect("up", "--cpus-per-shard, --strategy", "--on", ("--strategy", "PACK")),
    OptionEffect(
        "up", "--host, --port, --advertise, --metrics-port", "no --on", ("--on", "auto", "--metrics-port", "5")
    ),
    OptionEffect("up", "--serve", "--on", ("--serve", "m")),
    OptionEffect(
        "up", "--serve-root, --serve-namespace, --serve-processes", "--serve", ("--on", "auto", "--serve-root", "r")
    ),
    OptionEffect("up", "--ssd-bytes", "--ssd-path", ("--ssd-bytes", "1GiB")),
    OptionEffect("up", "--ssd-direct-io", "--ssd-path", ("--ssd-direct-io",)),
    OptionEffect("up", "--ssd-engine", "--ssd-path", ("--ssd-engine", "pages")),
)


def render_table() -> list[str]:
    """Returns the table as lines of Markdown."""
    lines = ["| where | option | has an effect only with |", "|---|---|---|"]
    for each in OPTION_EFFECTS:
        where = "job file" if each.where == "job" else f"`sparserow {each.where}`"
        lines.append(f"| {where} | {each.option} | {each.beside} |")
    return lines
