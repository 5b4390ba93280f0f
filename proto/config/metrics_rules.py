"""Which metrics the evaluations of a job have, by which it may stop or keep its best model."""

from __future__ import annotations

from ..errors import not_allowed
from .job_sections import JobSections
from .tasks_config import MetricsName
from .tasks_rules import tasks_of_job


def check_metrics(job: JobSections) -> None:
    """Raises InvalidArgument when an option of the section metrics names a metric that the evaluations do not have."""
    if job.metrics.stop is not None:
        _check_judged(job, "metrics.stop.metric", job.metrics.stop.metric)
    if job.metrics.best is not None:
        _check_judged(job, "metrics.best", job.metrics.best)


def _check_judged(job: JobSections, setting: str, metric: str) -> None:
    """Raises InvalidArgument when the evaluations of a job do not have a metric, or it has no better and worse."""
    judged = [f"{task.name}.{name}" for task in tasks_of_job(job) for name in _judged(job, task.judged_as)]
    if metric not in judged:
        raise not_allowed(setting, metric, ", ".join(judged))


def _judged(job: JobSections, loss: MetricsName) -> list[str]:
    """Returns the names of the metrics of a loss for which higher or lower is better."""
    if loss == "mse":
        return ["mse", "mae"]
    if loss != "bce":
        return ["loss", "mrr", *(f"{name}@{k}" for k in job.metrics.at for name in ("hit_rate", "ndcg"))]
    has_groups = job.data.samples.group is not None
    return ["auc", *(["gauc"] if has_groups else []), "log_loss", "normalized_entropy"]
