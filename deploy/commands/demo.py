"""``sparserow demo``: shows the main job in a minute, on a synthetic click log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_CLUSTER_DEADLINE_SEC = 60.0


def demo(
    *,
    rows: Annotated[int, typer.Option(help="Samples of the training part of the click log.")] = 800_000,
    shards: Annotated[int, typer.Option(help="Parameter servers.")] = 2,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the click log and of training.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the result to.")] = None,
) -> None:
    """Train DLRM on a synthetic click log and serve it live: two shards, two workers, a serving process.

    The log is written in Criteo's format to a temporary folder. The AUC of the model that generates it is the best that
    can be reached on average. During training, the rows are published and served, and live sync sends the changes. At
    the end every serving row is compared with the training row, and everything is stopped.
    """
    import contextlib
    import tempfile

    from rich.console import Console

    from ...proto.config.cluster_config import ClusterConfig
    from ...proto.config.job import JobConfig
    from ...proto.config.log_config import LogConfig
    from ...proto.config.publish_config import PublishConfig
    from ...proto.errors import Internal, ResourceExhausted, not_allowed
    from ...proto.options.document import load_config
    from ...worker.data.synthetic import write_click_log
    from ..examples.serving_demo import ServingDemo
    from ..launch.local_cluster import start_local
    from ..launch.termination import interrupted_by_termination
    from ..train.training_display import summary
    from ..train.training_job import run_job
    from .result_file import check_result_file, write_result

    check_result_file(json_file)
    if rows < 1:
        raise not_allowed("--rows", rows, ">= 1")
    job_file = Path(__file__).resolve().parents[1] / "jobs" / "demo.yaml"
    with interrupted_by_termination(), tempfile.TemporaryDirectory(prefix="sparserow-demo-") as folder:
        sets = {
            "data.train": f"{folder}/train.tsv",
            "data.test": f"{folder}/test.tsv",
            "cluster.shards": shards,
            "train.workers": workers,
            "train.seed": seed,
        }
        job = load_config(JobConfig, job_file, [f"{key}={value}" for key, value in sets.items()])
        note = Console(stderr=True)
        note.print(f"writing a click log of {rows:,} samples")
        try:
            log = write_click_log(Path(folder), rows=rows, seed=seed)
        except OSError as error:
            raise ResourceExhausted(f"{folder}: the click log cannot be written: {error.strerror}") from error
        note.print(f"starting {shards} parameter servers and {workers} workers")
        with contextlib.ExitStack() as stack:
            cluster = start_local(
                job.cluster, LogConfig(level="warning"), deadline_sec=_CLUSTER_DEADLINE_SEC, page_port=0
            )
            stack.callback(cluster.stop)
            note.print(f"page at {cluster.page}", highlight=False)
            serving = ServingDemo(cluster.address, job.name, f"{folder}/models")
            serving.start()
            stack.callback(serving.abandon)
            given = {"cluster": ClusterConfig(address=cluster.address), "publish": PublishConfig(local=None)}
            result = run_job(job.model_copy(update=given))
            note.print("comparing every serving row with the training row")
            served = serving.finish()
            cluster.check()
    figures = {
        "test_auc": result.test_auc,
        "bayes_auc": log.bayes_auc,
        "samples_per_sec": result.samples_per_sec,
        "rows": rows,
        "shards": result.shards,
        "workers": result.workers,
        "test_log_loss": result.test_log_loss,
        "bayes_log_loss": log.bayes_log_loss,
        "table_rows": result.rows,
        "seed": seed,
        "serving_rows_checked": served.rows_checked,
        "serving_rows_equal": served.rows_equal,
        "freshness_p99_ms": served.freshness_p99_ms,
        "lookup_p50_ms": served.lookup_p50_ms,
    }
    write_result(json_file, figures)
    table = summary("demo: DLRM on a synthetic click log", result, bayes_auc=log.bayes_auc)
    table.add_row("serving rows equal to training", f"{served.rows_equal:,} of {served.rows_checked:,}")
    if served.freshness_p99_ms is not None:
        table.add_row("served after a change, p99 below", f"{served.freshness_p99_ms:,.0f} ms")
    table.add_row("lookup of 100 keys, p50", f"{served.lookup_p50_ms:.2f} ms")
    Console().print(table)
    if served.rows_equal != served.rows_checked:
        raise Internal(f"{served.rows_checked - served.rows_equal} serving rows differ from the training rows")
