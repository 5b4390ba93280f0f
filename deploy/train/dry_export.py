"""Tries to export the model of a job for serving before it is trained, over servers in this process."""

from __future__ import annotations

from dataclasses import replace

from ...proto.config.job import JobConfig
from ...proto.errors import InvalidArgument
from ...proto.security.security import loaded_security
from ...worker.api.in_process import InProcessCluster
from ...worker.data import Batch, FeatureSpec, NamedBatch
from ...worker.layers.deferred import deferred
from ...worker.publish.program_export import export_program
from ...worker.training.build_model import build_model, input_names
from ...worker.training.exported_model import exported
from ...worker.training.job_tables import JobTables
from .dry_batch import read_first_samples

_LEAST_SAMPLES = 2  # of an example


def is_to_be_exported(job: JobConfig) -> bool:
    """Whether a run of the job fails unless its model, whose code may be anything, can be exported.

    Where the job names no folder for its model, a run ends well where the model cannot be kept.
    """
    return job.publish.is_asked and ":" in job.model.class_ and job.model.backend == "ps"


def check_export(job: JobConfig) -> None:
    """Tries the export on the first training samples, for a job whose run ends with one.

    Raises:
        InvalidArgument: the model cannot be exported, for the reason in the text.
        NotFound, BadLine, DataLoss: the beginning of the training data cannot be read.
    """
    if is_to_be_exported(job):
        first = read_first_samples(job)
        try_export(job, first.spec, first.batch)


def try_export(job: JobConfig, spec: FeatureSpec, batch: Batch) -> None:
    """Exports the model of a job, with weights as they are before training, and forgets the program.

    The tables are on servers in this process and have no rows, since an export looks none up.

    Args:
        job: the job.
        spec: the features of its data.
        batch: some samples. Where they have no example of the model's arguments, nothing is tried.

    Raises:
        InvalidArgument: the model cannot be exported, for the reason in the text.
    """
    names = input_names(job.model, spec)
    given = NamedBatch.of(batch, names, len(batch))
    if len(batch) < _LEAST_SAMPLES or given.example(len(batch)) is None:
        return
    with InProcessCluster().connect("dry-run") as session:
        with deferred(min_rows=job.model.min_rows):
            plain = build_model(job.model, spec)
        tables = JobTables(job, plain)
        options = {name: replace(table, placement="servers") for name, table in tables.options(None).items()}
        model = session.distribute(
            plain,
            optimizer=job.train.row_optimizer.row_optimizer(),
            min_rows=job.model.min_rows,
            tables=options,
            bind=tables.bind,
        )
        is_signed = bool(loaded_security(None).signing_key)
        try:
            export_program(exported(model, [given], negatives_keep=job.data.negatives_keep), is_signed=is_signed)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; leave publish out to train it all the same") from error
