"""The schema of a training job: the document that ``sparserow train JOB.yaml`` reads.

``sparserow up`` shares its section cluster. To add an option, add a field with its description (meaning and unit), its
default and its range. deploy/reference/config_reference.py generates the page docs/configuration.md from the fields.
"""

from __future__ import annotations

from datetime import date

from pydantic import model_validator

from ..errors import InvalidArgument
from .features_rules import features_of_job
from .job_sections import JobSections
from .metrics_rules import check_metrics
from .parallel_config import check_ranks
from .placement_rules import check_placements
from .rules import check_rules
from .tasks_config import Task
from .tasks_rules import tasks_of_job


class JobConfig(JobSections):
    """A training job: the data, the model, how it is trained, and where the rows and the result go."""

    @model_validator(mode="after")
    def _features_fit_the_data(self) -> JobConfig:
        self.data.read_features(features_of_job(self))
        return self

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """The tasks of the job, at least one."""
        return tasks_of_job(self)

    def of_day(self, day: date, *, url: str | None = None, before: str | None = None) -> JobConfig:
        """Returns the job of one day of ``data.days``.

        Args:
            day: the day.
            url: the folder of its checkpoints; None: that of the whole job.
            before: the checkpoint that it starts from; None: none.
        """
        days, checkpoint = self.data.days, self.train.checkpoint
        assert days is not None
        assert checkpoint is not None  # as rules say
        test = self.data.test or (days.files_of(days.next(day)),)
        data = self.data.model_copy(update={"days": None, "train": (days.files_of(day),), "test": test})
        accept = checkpoint.accept if before == checkpoint.start_from else ()
        saved = checkpoint.model_copy(update={"url": url or checkpoint.url, "start_from": before, "accept": accept})
        return self.model_copy(update={"data": data, "train": self.train.model_copy(update={"checkpoint": saved})})

    @property
    def of_first_day(self) -> JobConfig:
        """The job of the first day of ``data.days``, for what looks at a job before it runs; without days the job."""
        return self if self.data.days is None else self.of_day(self.data.days.first)

    @model_validator(mode="after")
    def _options_have_what_they_need(self) -> JobConfig:
        tasks_of_job(self)  # first, as it refuses tasks that the labels do not have
        check_rules(self)
        check_metrics(self)
        return self

    @model_validator(mode="after")
    def _cache_is_within_the_staleness(self) -> JobConfig:
        train, cache = self.train, self.train.cache
        if cache is None:
            return self
        if train.staleness is not None and train.prefetch > train.staleness:
            raise InvalidArgument(
                f"train.prefetch: {train.prefetch} is not allowed with train.cache and train.staleness "
                f"{train.staleness}; allowed: 0 to {train.staleness}"
            )
        used = cache.staleness + train.prefetch
        if train.staleness is not None and used > train.staleness:
            most = max(0, train.staleness - train.prefetch)
            raise InvalidArgument(
                f"train.cache.staleness: {cache.staleness} is not allowed with train.staleness {train.staleness} and "
                f"train.prefetch {train.prefetch}; allowed: 0 to {most}"
            )
        return self

    @model_validator(mode="after")
    def _towers_in_parts(self) -> JobConfig:
        if self.train.parallel is not None and "workers" in self.train.model_fields_set:
            check_ranks(self.train.parallel, self.train.workers)
        return self

    @model_validator(mode="after")
    def _tables_on_devices(self) -> JobConfig:
        check_placements(self)
        return self
