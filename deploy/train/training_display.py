"""Shows a training run on a terminal: a progress bar, a line for each epoch, and a table at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...proto.options.units import format_bytes
from ...worker.training.training_report import (
    EpochResult,
    Evaluated,
    EvaluationPoint,
    TrainResult,
    why_undefined,
)

if TYPE_CHECKING:
    from ...worker.data.batch import TimeRange


class TrainingDisplay:
    """An observer that draws on stderr. The bar moves only on a terminal; the line of an epoch is always written.

    Args:
        epochs: the number of epochs of the run.
        silent: whether nothing is shown, as on all ranks but the first.
        of_worker: the rank whose numbers are shown, when workers do not share them; None names none.
    """

    def __init__(self, epochs: int, *, silent: bool = False, of_worker: int | None = None) -> None:
        self._whose = "" if of_worker is None else f" of worker {of_worker}"
        self._console = Console(stderr=True, quiet=silent)
        self._epochs = epochs
        self._samples_before = 0
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=silent or not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._clock = _Clock()

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        self._task = self._progress.add_task("train", total=None, epoch=f"1/{self._epochs}", figures="starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def batch(self, *, epoch: int, done: float | None, samples: int, loss: float, auc: float) -> None:
        """Moves the bar to the progress of a batch."""
        rate = self._clock.rate(epoch, samples)
        self._show(epoch, done, f"{rate:,.0f} samples/s{self._whose}  loss {loss:.4f}  AUC {auc:.4f}")

    def goes_on(self, results: Sequence[EpochResult]) -> None:
        """Shows nothing; see :class:`Observer`."""

    def window(self, epoch: int, samples: int, metrics: Mapping[str, float], times: TimeRange | None = None) -> None:
        """Shows nothing: the bar has the metrics of recent samples."""

    def evaluating(self, epoch: int) -> None:
        """Shows that the epoch is being evaluated."""
        self._show(epoch, None, "evaluating")

    def point(self, result: EvaluationPoint) -> None:
        """Writes the line of a test within an epoch."""
        self._console.print(
            f"epoch {result.epoch}/{self._epochs}, {result.samples:,} samples: {tested(result)}",
            highlight=False,
            soft_wrap=True,
        )

    def epoch(self, result: EpochResult) -> None:
        """Writes the line of a finished epoch."""
        self._console.print(
            f"epoch {result.epoch}/{self._epochs}: loss {result.train_loss:.4f}, {tested(result)}, "
            f"{result.samples_per_sec:,.0f} samples/s{self._whose}",
            highlight=False,
            soft_wrap=True,
        )

    def _show(self, epoch: int, done: float | None, figures: str) -> None:
        if self._task is not None:
            total = None if done is None else 1.0
            self._progress.update(
                self._task, total=total, completed=done or 0.0, epoch=f"{epoch}/{self._epochs}", figures=figures
            )


class _Clock:
    """Measures samples per second since the first report of an epoch."""

    def __init__(self) -> None:
        self._epoch = 0
        self._began = 0.0
        self._samples = 0

    def rate(self, epoch: int, samples: int) -> float:
        """Returns the samples per second of the epoch so far; 0 at its first report."""
        now = time.perf_counter()
        if epoch != self._epoch:
            self._epoch, self._began, self._samples = epoch, now, samples
        seconds = now - self._began
        return (samples - self._samples) / seconds if seconds > 0 else 0.0


def summary(title: str, result: TrainResult, *, bayes_auc: float | None = None) -> Table:
    """Returns the final table of a run.

    Args:
        title: the title of the table.
        result: the result of the run.
        bayes_auc: the AUC of the model that generated the data; None when it is not known.
    """
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    metrics = result.metrics
    if has_usual_metrics(metrics):
        auc = _text_of(metrics, _auc_name(metrics), result.test_auc)
        rows = [("test AUC", auc), ("test log-loss", f"{result.test_log_loss:.4f}")]
    else:
        rows = [(f"test {name}", _text_of(metrics, name, value)) for name, value in metrics.items() if is_shown(name)]
    if bayes_auc is not None:
        rows.append(("AUC of the generating model", f"{bayes_auc:.4f} ({result.test_auc / bayes_auc:.1%} reached)"))
    rows += [
        ("samples/s", f"{result.samples_per_sec:,.0f}"),
        ("epochs", _epochs(result)),
        ("table rows", f"{result.rows:,}"),
        ("parameter servers", str(result.shards)),
        ("workers", str(result.workers)),
        ("device", result.device),
        ("bad lines skipped", str(result.bad_lines)),
    ]
    left_out = [f"{count:,} {name}" for name, count in result.stream.items() if name != "events" and count]
    if left_out:
        rows.append(("events left out", ", ".join(left_out)))
    if result.staleness:
        rows.append(("steps that pulls were stale", _staleness(result)))
    if result.cache:
        rows.append(("row cache", cache_line(result.cache)))
    if result.tiers:
        rows += [("rows in memory", hits_line(result.tiers)), ("rows on SSD", ssd_line(result.tiers))]
    if result.refused_steps:
        rows.append(("steps refused (NaN or Inf)", f"{result.refused_steps:,}"))
    if result.quorum:
        refused, missed = result.quorum["refused_steps"], result.quorum["missed_steps"]
        rows.append(("steps without a worker", f"{refused:,} refused, {missed:,} missed"))
    if result.workers_lost:
        left = "what they had still to train on was left out"
        rows.append(("workers lost", f"{result.workers_lost} of {result.workers + result.workers_lost}; {left}"))
    if result.shard_restores:
        lost = f"{result.commits_lost:,} commits of a worker to a shard were lost"
        rows.append(("shards that came back", f"{result.shard_restores}; {lost}"))
    gone = "nowhere: publish.root and publish.local name no folder"
    rows += [("the model is kept", place) for place in result.kept or (gone,)] if result.backend == "ps" else []
    for name, value in rows:
        table.add_row(name, value)
    if result.first_bad_line is not None:
        table.caption = f"first bad line: {result.first_bad_line}"
    return table


def _epochs(result: TrainResult) -> str:
    if result.best_epoch is None:
        return str(result.epochs)
    place = (result.best_epoch, result.best_step)
    is_within = all((each.epoch, each.step) != place for each in result.history)
    within = f", step {result.best_step}" if is_within else ""
    return f"{result.epochs}; the model is that of epoch {result.best_epoch}{within} ({result.best_checkpoint})"


def next_commands(result: TrainResult) -> list[str]:
    """Returns lines with the commands that publish and serve the kept model."""
    return [f"to {verb} the model: {command}" for verb, command in result.commands.items()]


def cache_line(cache: dict[str, int]) -> str:
    """Returns a line such as ``81% hits, 12% asked about (3% sent again), 7% misses; 1.2 MB saved``."""
    total = max(1, cache["hits"] + cache["revalidated"] + cache["misses"])
    hits, asked, again, misses = (cache[name] / total for name in ("hits", "revalidated", "refreshed", "misses"))
    saved = f"{cache['bytes_saved'] / 1e6:,.1f} MB saved"
    return f"{hits:.0%} hits, {asked:.0%} asked about ({again:.0%} sent again), {misses:.0%} misses; {saved}"


def hits_line(tiers: dict[str, float]) -> str:
    """Returns a line such as ``97.1% of 1,234,567 keys; 30,000 ahead of use; 250,000 evicted``."""
    keys = max(1.0, tiers["hits"] + tiers["misses"])
    ahead, evicted = tiers["brought_ahead"], tiers["rows_evicted"]
    return f"{tiers['hits'] / keys:.1%} of {keys:,.0f} keys; {ahead:,.0f} ahead of use; {evicted:,.0f} evicted"


def ssd_line(tiers: dict[str, float]) -> str:
    """Returns a line such as ``3.2 GiB of files; read 1.1 GiB in 4.2 ms a batch of 310 rows, wrote 2.0 GiB in 1.0 ms a
    batch of 512``.
    """
    parts = [f"{format_bytes(int(tiers['file_bytes']))} of files"]
    for verb, batches, kind in (("read", "reads", "read"), ("wrote", "writes", "written")):
        count = max(1.0, tiers[batches])
        seconds = tiers["read_sec" if verb == "read" else "write_sec"]
        parts.append(
            f"{verb} {format_bytes(int(tiers[f'bytes_{kind}']))} in {1e3 * seconds / count:.2f} ms a batch of "
            f"{tiers[f'rows_{kind}'] / count:,.0f} rows"
        )
    return "; ".join(parts)


def _staleness(result: TrainResult) -> str:
    """Returns the shares of all tables' pulls by staleness in steps, such as ``0: 93%, 1: 7%``."""
    pulls: dict[str, int] = {}
    for buckets in result.staleness.values():
        for bound, count in buckets.items():
            pulls[bound] = pulls.get(bound, 0) + count
    total = sum(pulls.values())
    shares = sorted(pulls.items(), key=lambda item: float(item[0]))
    return ", ".join(f"{bound}: {count / total:.0%}" for bound, count in shares)


def tested(result: Evaluated) -> str:
    """Returns the metrics of a test as text: of each task, without those of buckets."""
    if has_usual_metrics(result.metrics):
        if math.isnan(result.test_log_loss):
            return "not tested"  # worker 0 was restarted during the next epoch
        auc = _text_of(result.metrics, _auc_name(result.metrics), result.test_auc)
        return f"test AUC {auc}, log-loss {result.test_log_loss:.4f}"
    metrics = result.metrics
    return "test " + ", ".join(
        f"{name} {_text_of(metrics, name, value)}" for name, value in metrics.items() if is_shown(name)
    )


def _auc_name(metrics: Mapping[str, float]) -> str:
    """Returns the name of the AUC where there is one task; "" where nothing was tested."""
    return next((name for name in metrics if name.endswith(".auc")), "")


def _text_of(metrics: Mapping[str, float], name: str, value: float) -> str:
    """Returns the value of a metric as text, with the reason where it has none."""
    reason = why_undefined(metrics, name)
    return f"{value:.4f}" if reason is None else f"none ({reason})"


def has_usual_metrics(metrics: Mapping[str, float]) -> bool:
    """Returns whether there is one task, with binary cross entropy and without groups."""
    tasks = {name.partition(".")[0] for name in metrics}
    return not metrics or (len(tasks) == 1 and f"{next(iter(tasks))}.log_loss" in metrics and not _with_groups(metrics))


def _with_groups(metrics: Mapping[str, float]) -> bool:
    return any(name.endswith(".gauc") for name in metrics)


def is_shown(name: str) -> bool:
    """Returns whether a metric is one of those that are shown: not of a bucket, nor derived from another."""
    return "[" not in name and name.partition(".")[2] not in ("normalized_entropy", "auc_error", "mrr")
