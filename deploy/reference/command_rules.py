"""The options of commands that have an effect only beside others; docs/configuration.md shows them after those of jobs.

A command checks them itself. Each line has an example that breaks it. A test runs all examples: the error names the
option.
"""

from __future__ import annotations

from ...proto.config.rules import RULES, Rule

_PREDICT = ("--model", "m", "--root", "r", "--input", "rows.parquet")

COMMAND_RULES: tuple[Rule, ...] = (
    Rule("--disk-bytes", "--disk", "", ("--disk-bytes", "5GiB"), where="doctor"),
    Rule(
        "--job, --coordinator, --listen, --host, --disk-bytes, --memory-budget",
        "no --nodes",
        "",
        ("--nodes", "--memory-budget", "5GiB"),
        where="doctor",
    ),
    Rule("--nodes", "torchrun or Ray", "", ("--nodes",), where="doctor"),
    Rule("--slower-than", "--nodes", "", ("--slower-than", "3"), where="doctor"),
    Rule("--timeout", "--nodes", "", ("--timeout", "30s"), where="doctor"),
    Rule("--key", "--table", "", ("FOLDER", "--key", "5"), where="inspect"),
    Rule("--table", "--key", "", ("FOLDER", "--table", "a/b"), where="inspect"),
    Rule(
        "--delimiter, --list-delimiter, --quote, --comment, --trim, --header, --columns, --missing",
        "--input of CSV",
        "",
        (*_PREDICT, "--delimiter", ";"),
        where="predict",
    ),
    Rule("--keep, --only", "an --output that ends in .parquet", "", (*_PREDICT, "--keep", "a"), where="predict"),
    Rule("--ssd-direct-io", "--ssd-path", "", ("--coordinator", "a:1", "--shard", "0", "--ssd-direct-io"), where="ps"),
    Rule(
        "--ssd-engine", "--ssd-path", "", ("--coordinator", "a:1", "--shard", "0", "--ssd-engine", "pages"), where="ps"
    ),
    Rule("--ssd-bytes", "--ssd-path", "", ("--coordinator", "a:1", "--shard", "0", "--ssd-bytes", "1GiB"), where="ps"),
    Rule("--features", "--program", "", ("m", "--root", "r", "--namespace", "n", "--features", "f"), where="publish"),
    Rule(
        "--sign",
        "signing_key of the security file",
        "",
        ("m", "--root", "r", "--namespace", "n", "--sign", "rows"),
        where="publish",
    ),
    Rule("--model", "--serving", "", ("a/t", "5", "--model", "m"), where="row"),
    Rule("--namespace", "no --root", "", ("--model", "m", "--root", "r", "--namespace", "n"), where="serve"),
    Rule("--ssd-direct-io", "--ssd-path", "", ("--model", "m", "--root", "r", "--ssd-direct-io"), where="serve"),
    Rule("--ssd-engine", "--ssd-path", "", ("--model", "m", "--root", "r", "--ssd-engine", "pages"), where="serve"),
    Rule("--ssd-path", "--memory-budget", "", ("--model", "m", "--root", "r", "--ssd-path", "s"), where="serve"),
    Rule(
        "--sync-after-updates, --sync-after-move",
        "--follow",
        "",
        ("--model", "m", "--root", "r", "--sync-after-updates", "5"),
        where="serve",
    ),
    Rule(
        "--sync-max-delay",
        "--sync-after-updates or --sync-after-move",
        "",
        ("--model", "m", "--root", "r", "--follow", "a:1", "--sync-max-delay", "9s"),
        where="serve",
    ),
    Rule("--sync-interval", "--follow", "", ("--model", "m", "--root", "r", "--sync-interval", "5s"), where="serve"),
    Rule("--over", "no --faults", "", ("--faults", "--over", "3s"), where="status"),
    Rule("--serving", "no --faults", "", ("--faults", "--serving", "a:1"), where="status"),
    Rule(
        "--overwrite-checkpoints",
        "--resume never",
        "",
        ("JOB", "--resume", "auto", "--overwrite-checkpoints", "--set", "train.checkpoint={url: /c, every_steps: 1}"),
        where="train",
    ),
    Rule(
        "--overwrite-checkpoints",
        "train.checkpoint, or train.elastic.url",
        "",
        ("JOB", "--overwrite-checkpoints"),
        where="train",
    ),
    Rule("train.node_check", "torchrun or Ray", "", ("JOB", "--set", "train.node_check={}"), where="train"),
    Rule("--cpus-per-shard, --strategy", "--on", "", ("--strategy", "PACK"), where="up"),
    Rule(
        "--host, --port, --advertise, --metrics-port, --page-port",
        "no --on",
        "",
        ("--on", "auto", "--metrics-port", "5"),
        where="up",
    ),
    Rule("--serve", "--on", "", ("--serve", "m"), where="up"),
    Rule(
        "--serve-root, --serve-namespace, --serve-processes",
        "--serve",
        "",
        ("--on", "auto", "--serve-root", "r"),
        where="up",
    ),
    Rule("--ssd-bytes", "--ssd-path", "", ("--ssd-bytes", "1GiB"), where="up"),
    Rule("--ssd-direct-io", "--ssd-path", "", ("--ssd-direct-io",), where="up"),
    Rule("--ssd-engine", "--ssd-path", "", ("--ssd-engine", "pages"), where="up"),
)


def render_table() -> list[str]:
    """Returns the rules of jobs and commands as lines of Markdown."""
    lines = ["| where | option | needs |", "|---|---|---|"]
    for rule in (*RULES, *COMMAND_RULES):
        where = "job file" if rule.where == "job" else f"`sparserow {rule.where}`"
        lines.append(f"| {where} | {rule.option} | {rule.needs}{f', {rule.because}' if rule.because else ''} |")
    return lines
