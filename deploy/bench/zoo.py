"""``bench zoo``: trains each model of the zoo by its job file, on servers and in plain torch, and compares the metrics.

Both read the same synthetic log of sales and begin with the same rows and weights; the servers are processes of their
own. HR@10 and recall@100 are exact over all items. What is best possible is known: the log's generating
probabilities have the best AUC on average, and the rule by which it draws the next item has the best hit rate.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ...proto.config.job import JobConfig
from ...proto.options.document import load_config
from ...proto.row_keys import hash_key
from ...worker.api.connect import connect
from ...worker.api.in_process import InProcessCluster
from ...worker.data import Batch, ReadOptions, SalesLog, write_sales_log
from ...worker.data.sources import fit_features, open_reader
from ...worker.layers.deferred import deferred
from ...worker.layers.distribute import layers_of_tables
from ...worker.metrics.retrieval import hit_rate, ranks_among_all
from ...worker.models import SASRec, TwoTower
from ...worker.training.job_tables import JobTables
from ...worker.training.local_backend import LocalBackend
from ...worker.training.process_group import WorkerGroup
from ...worker.training.ps_backend import PsBackend
from ...worker.training.trainer import Trainer
from ...worker.training.training_backend import TrainingBackend
from ...worker.training.training_report import Silence, TrainResult
from ..launch.local_cluster import local_cluster
from .harness import Figure

JOBS = Path(__file__).resolve().parents[1] / "jobs"
LIMIT_OF_AUC = 0.002
LIMIT_OF_RANKING = 0.005


@dataclass(frozen=True)
class ZooSize:
    """The sizes of the log and of the runs.

    Attributes:
        rows: the number of training samples; a tenth of them are tested.
        users, items: the numbers of users and items.
        history: the mean length of a history.
        batch: the number of samples of a step.
        seeds: the number of runs of each model, each with a seed of its own.
        epochs: the number of epochs; None: as each case says.
    """

    rows: int
    users: int
    items: int
    history: int
    batch: int
    seeds: int
    epochs: int | None = None


FULL = ZooSize(rows=200_000, users=500, items=400, history=50, batch=512, seeds=3)
QUICK = ZooSize(rows=2_000, users=50, items=40, history=5, batch=128, seeds=1, epochs=1)
CANDIDATES = 20
ROWS = 1 << 16  # of a table; keys are hashes, and few of the ids share a row


@dataclass(frozen=True)
class Case:
    """A job file of the zoo and how it is run.

    Attributes:
        job: the name of the job file.
        tables: the features that tables are named after.
        epochs: the number of epochs of the full run.
        sets: settings beside those of all cases.
    """

    job: str
    tables: tuple[str, ...] = ("user", "item")
    epochs: int = 3
    sets: tuple[str, ...] = ()


CASES = (
    Case("dlrm"),
    Case("deepfm"),
    Case("wide_deep", sets=(f"model.args.wide={{item: {ROWS}, user_item: {16 * ROWS}}}",)),
    Case("dcn"),
    Case("autoint"),
    Case("din", epochs=2),
    Case("mmoe", epochs=8),
    Case("sasrec", tables=("candidates",), epochs=1, sets=("model.args.dim=32",)),
    # The price is of a sample, not of an item, so it belongs to the user's side where all items are ranked.
    Case("two_tower", sets=("model.args.item=[item]",)),
)


class SameBeginning(LocalBackend):
    """A local backend whose model begins with the rows and the weights that a job on servers begins with.

    Args:
        job: the job.
    """

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job.train, job.model.min_rows)
        self._job = job

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Returns the model in plain torch."""
        job = self._job
        with deferred(min_rows=job.model.min_rows):
            other = make()  # as PsBackend makes it, from the same state of torch's generator
        model = super().build(make)
        tables = JobTables(job, other)
        layers = layers_of_tables(model, job.model.min_rows, tables.bind)
        with InProcessCluster().connect(job.name) as session, torch.no_grad():
            made = session.distribute(
                other,
                optimizer=job.train.row_optimizer.row_optimizer(),
                min_rows=job.model.min_rows,
                tables=tables.options(None),
                bind=tables.bind,
            )
            for table in layers:
                weight = table.layers[0].layer.weight
                weight.copy_(torch.from_numpy(session.table(table.name).pull(np.arange(len(weight)))))
            own = dict(model.named_parameters())
            for name, parameter in made.named_parameters():
                if parameter.numel() > 0:  # that of a distributed layer is empty
                    own[name].copy_(parameter)
        return model


def run_zoo(size: ZooSize) -> Iterator[Figure]:
    """Trains and compares every model; the full run takes about half an hour on two CPUs.

    Yields:
        What is best possible on the log; then, for each metric of each model, its mean over the seeds on servers, its
        mean in plain torch, and their difference.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = write_sales_log(
            Path(folder),
            rows=size.rows,
            users=size.users,
            items=size.items,
            history=size.history,
            candidates=CANDIDATES,
        )
        yield Figure("zoo: best possible AUC of clicks", log.click_auc, "AUC")
        yield Figure("zoo: best possible AUC of purchases", log.buy_auc, "AUC")
        yield Figure("zoo: share of next items that follow the rule", log.hit_rate, "of 1")
        for case in CASES:
            yield from _compare(case, size, log)


def _compare(case: Case, size: ZooSize, log: SalesLog) -> Iterator[Figure]:
    jobs = [_job(case, size, log, seed) for seed in range(size.seeds)]
    served = [_on_servers(job, size) for job in jobs]
    local = [_run(job, size, SameBeginning(job)) for job in map(_in_torch, jobs)]
    for name in served[0]:
        ours, theirs = (statistics.mean(run[name] for run in runs) for runs in (served, local))
        limit = LIMIT_OF_AUC if name.endswith("auc") else LIMIT_OF_RANKING
        yield Figure(f"{case.job}: {name} on servers", ours, "of 1")
        yield Figure(f"{case.job}: {name} in plain torch", theirs, "of 1")
        yield Figure(f"{case.job}: {name}, difference", abs(ours - theirs), "of 1", limit, higher_is_better=False)


def _job(case: Case, size: ZooSize, log: SalesLog, seed: int) -> JobConfig:
    rows = ", ".join(f"{name}: {ROWS}" for name in case.tables)
    return load_config(
        JobConfig,
        JOBS / f"{case.job}.yaml",
        [
            f"data.train={log.train}",
            f"data.test={log.test}",
            f"model.args.rows={{{rows}}}",
            "model.args.init_scale=0.1",
            "model.min_rows=1",
            f"train.batch_size={size.batch}",
            f"train.epochs={size.epochs or case.epochs}",
            f"train.seed={seed}",
            "train.dense_optimizer.lr=0.003",
            "train.row_optimizer.lr=0.2",
            *case.sets,
        ],
    )


def _in_torch(job: JobConfig) -> JobConfig:
    train = job.train.model_copy(update={"prefetch": 0})
    return job.model_copy(update={"train": train, "model": job.model.model_copy(update={"backend": "local"})})


def _on_servers(job: JobConfig, size: ZooSize) -> dict[str, float]:
    with (
        local_cluster(shards=job.cluster.shards) as cluster,
        connect(cluster.address, job.name, staleness=job.train.staleness) as session,
    ):
        return _run(job, size, PsBackend(job, session, cluster.address))


def _run(job: JobConfig, size: ZooSize, backend: TrainingBackend) -> dict[str, float]:
    """Trains, and returns the metrics of the last epoch and those over all items."""
    trainer = Trainer(job, group=WorkerGroup(), backend=backend, observer=Silence())
    result: TrainResult = trainer.run()
    found = {name: value for name, value in result.history[-1].metrics.items() if name.endswith(".auc")}
    model = trainer.model.eval()
    if isinstance(model, SASRec | TwoTower):
        found |= _over_all_items(job, model, size.items)
    return found


@torch.no_grad()
def _over_all_items(job: JobConfig, model: SASRec | TwoTower, count: int) -> dict[str, float]:
    keys = _keys_of_items(job, model.item if isinstance(model, SASRec) else "item", count)
    users, positives = [], []
    for batch in open_reader(job.data, "test", fit_features(job.data), ReadOptions(1024)):
        assert isinstance(batch, Batch)
        vectors, items = _of_batch(model, batch)
        users.append(vectors)
        positives.append(torch.searchsorted(keys, items))
    vectors = model.item_vectors(keys) if isinstance(model, SASRec) else model.item_vectors(item=keys)
    ranks = ranks_among_all(torch.cat(users), vectors, torch.cat(positives))
    return {"HR@10 over all items": hit_rate(ranks, 10), "recall@100 over all items": hit_rate(ranks, 100)}


def _keys_of_items(job: JobConfig, feature: str, count: int) -> Tensor:
    """Returns the keys of all items in the job's feature, sorted."""
    modulo = int(job.features[feature]["modulo"])
    keys = torch.tensor(sorted({hash_key(str(item)) % modulo for item in range(count)}))
    assert len(keys) == count, "two items have one key"
    return keys


def _of_batch(model: SASRec | TwoTower, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the vectors of users and the keys of their next items, of samples that have one."""
    tensors = batch.tensors
    if isinstance(model, SASRec):
        candidates, offsets = tensors[model.item]
        users = model.user_vectors(**{model.history: tensors[model.history]})
        return users, candidates[offsets[:-1] + batch.label("position").long()]
    is_click = batch.labels > 0.5
    users = model.user_vectors(**{name: tensors[name] for name in model.features["user"]})
    return users[is_click], tensors["item"][is_click]
