"""Options of training on real servers against plain torch: rows and dense weights, of one worker and of two."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data.synthetic import write_click_log
from sparserow.worker.models import Tower
from sparserow.worker.training.local_backend import LocalBackend
from sparserow.worker.training.process_group import WorkerGroup, joined_group
from sparserow.worker.training.ps_backend import PsBackend
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence, TrainResult
from sparserow_process import run_ranks

ALONE = WorkerGroup()
ROWS = 64
TABLE = "embeddings.tables.c"
COMMON = [
    "data.format=csv",
    "data.csv={columns: [y, x, c], label: y}",
    "features={x: {kind: dense}, c: {kind: id}}",
    f"model={{class: DeepFM, args: {{rows: {{'*': {ROWS}}}, dim: 4, hidden: [8], init_scale: 0.5}}, min_rows: 1}}",
    "train.batch_size=128",
    "train.row_optimizer={kind: adagrad, lr: 0.1}",
    "train.dense_optimizer={kind: adam, lr: 0.01}",
]


@dataclass
class State:
    """Weights of a model and what its training said; ``result`` is None where it raised."""

    dense: dict[str, torch.Tensor]
    rows: npt.NDArray[np.float32]
    result: TrainResult | None
    error: str = ""
    trainer: Trainer | None = None

    def assert_close(self, other: State, tolerance: float = 1e-6) -> None:
        np.testing.assert_allclose(self.rows, other.rows, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(self.dense, other.dense, rtol=tolerance, atol=tolerance)

    def differs(self, other: State) -> bool:
        """Whether both sides do."""
        dense = any(not torch.equal(value, other.dense[name]) for name, value in self.dense.items())
        return dense and not np.array_equal(self.rows, other.rows)


def job_of(log: Path, name: str, *sets: str) -> JobConfig:
    return load_config(JobConfig, None, [f"data.train={log}", f"data.test={log}", f"name={name}", *COMMON, *sets])


def initial(log: Path) -> State:
    job = job_of(log, "initial", "model.backend=local")
    return state_of(Trainer(job, group=ALONE, backend=LocalBackend(job.train), observer=Silence()))


def state_of(trainer: Trainer, rows: npt.NDArray[np.float32] | None = None) -> State:
    state = trainer._bare.state_dict()
    values = {name: value.detach().clone() for name, value in state.items() if not name.endswith("._extra_state")}
    mine = values.pop(f"{TABLE}.weight", None)
    return State(values, mine.numpy() if rows is None else rows, None, trainer=trainer)


def train_plainly(log: Path, *sets: str, group: WorkerGroup = ALONE) -> State:
    job = job_of(log, "plain", "model.backend=local", *sets)
    trainer = Trainer(job, group=group, backend=LocalBackend(job.train), observer=Silence())
    result = trainer.run()
    state = state_of(trainer)
    state.result = result
    return state


def train_served(
    address: str,
    log: Path,
    name: str,
    *sets: str,
    group: WorkerGroup = ALONE,
    hook: Callable[..., object] | None = None,
) -> State:
    """On servers, from the weights that plain torch begins with."""
    job, start = job_of(log, name, *sets), initial(log)
    torch.manual_seed(1)
    with sr.connect(address, job.name, on_nonfinite=job.train.on_nonfinite) as session:
        trainer = Trainer(job, group=group, backend=PsBackend(job, session, address), observer=Silence())
        trainer._bare.load_state_dict(start.dense)
        if hook is not None:
            trainer._model.register_comm_hook(None, hook)
        table = session.table(TABLE)
        if group.rank == 0:
            table.assign(np.arange(ROWS), start.rows)
        group.wait("peers")
        result, error = None, ""
        try:
            result = trainer.run()
        except sr.errors.SparserowError as caught:
            error = f"{type(caught).__name__}: {caught}"
        group.wait("peers")
        state = state_of(trainer, table.pull(np.arange(ROWS)))
        group.wait("peers")
        state.result, state.error = result, error
        return state


def write_log(path: Path, rows: int = 384, poison_at: int = -1) -> Path:
    """A number, a key and a label a line; a poisoned line's number is beyond what the model can bear."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 50, (rows,), generator=generator).tolist()
    lines = [f"{(key + at) % 2},{at % 7 / 7},k{key}\n" for at, key in enumerate(keys)]
    if poison_at >= 0:
        lines[poison_at] = "1,3e38,k1\n"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with sr.local_cluster(shards=2) as running:
        yield running
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.csv")


OPTIONS = {  # the served job's options, and plain torch's
    "accumulate": (["train.batch_size=32", "train.accumulate=4"], []),
    "accumulate-uneven": (["train.batch_size=50", "train.accumulate=3"], ["train.batch_size=150"]),
    "bfloat16": (["train.amp=bfloat16"], ["train.amp=bfloat16"]),
    "float16": (["train.amp=float16"], ["train.amp=float16"]),
    "checkpointing": (["train.activation_checkpointing=true"], []),
    "clip_norm": (["train.clip_norm=0.02"], ["train.clip_norm=0.02"]),
    "float16-clip_norm": (["train.amp=float16", "train.clip_norm=0.02"], ["train.amp=float16", "train.clip_norm=0.02"]),
    "schedule": ([SCHEDULE := "train.schedule={kind: cosine, total_steps: 4, warmup_steps: 2}"], [SCHEDULE]),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_one_worker_equals_plain_torch(cluster: sr.LocalCluster, log: Path, option: str) -> None:
    served_sets, plain_sets = OPTIONS[option]
    served = train_served(cluster.address, log, f"one-{option}", *served_sets)
    assert served.result is not None, served.error
    assert served.result.refused_steps == 0
    served.assert_close(train_plainly(log, *plain_sets))
    assert served.differs(initial(log))


ROW_OPTIMIZERS = (
    "kind: sgd, lr: 0.1, weight_decay: 0.1",
    "kind: sgd, lr: 0.1, momentum: 0.9, dampening: 0.5",
    "kind: sgd, lr: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.1, decoupled: true",
    "kind: adagrad, lr: 0.1, accumulator_decay: 0.9, initial_accumulator: 0.1",
    "kind: adagrad, lr: 0.1, weight_decay: 0.1, decoupled: true",
    "kind: rowwise_adagrad, lr: 0.1, initial_accumulator: 0.1",
    "kind: adam, lr: 0.05",
    "kind: adam, lr: 0.05, amsgrad: true, weight_decay: 0.1, decoupled: true",
    "kind: rmsprop, lr: 0.05, momentum: 0.5, centered: true",
    "kind: adadelta, weight_decay: 0.1",
    "kind: lion, lr: 0.01, weight_decay: 0.1",
    "kind: lamb, lr: 0.05, weight_decay: 0.1",
)


@pytest.mark.parametrize("options", ROW_OPTIMIZERS)
def test_every_row_optimizer_trains_alike_without_servers(cluster: sr.LocalCluster, log: Path, options: str) -> None:
    sets = [
        f"train.row_optimizer={{{options}}}",
        "train.epochs=3",
        "train.schedule={kind: step, every_epochs: 1, factor: 0.9}",
        "train.batch_size=32",
    ]
    served = train_served(cluster.address, log, f"rows{ROW_OPTIMIZERS.index(options)}", *sets)
    assert served.result is not None, served.error
    served.assert_close(train_plainly(log, *sets), tolerance=1e-5)
    assert served.differs(initial(log))


@pytest.mark.parametrize("option", ["bfloat16", "float16", "clip_norm", "schedule"])
def test_the_option_changes_what_is_learnt(log: Path, option: str) -> None:
    assert train_plainly(log, *OPTIONS[option][1]).differs(train_plainly(log))


@pytest.mark.parametrize("kind", ["DLRM", "DeepFM"])
def test_checkpointed_towers_compute_twice(log: Path, kind: str) -> None:
    calls = {}
    for option in ("false", "true"):
        sets = (
            f"model={{class: {kind}, args: {{rows: {{c: 64}}}}, backend: local}}",
            f"train.activation_checkpointing={option}",
        )
        job = job_of(log, "twice", *sets)
        trainer = Trainer(job, group=ALONE, backend=LocalBackend(job.train), observer=Silence())
        layers = [tower[0] for tower in trainer._bare.modules() if isinstance(tower, Tower)]
        made = calls[option] = []
        for layer in layers:
            layer.register_forward_hook(lambda module, *_, made=made: made.append(module) if module.training else None)
        trainer.run()
    assert len(calls["true"]) == 2 * len(calls["false"]) > 0


def test_rows_are_clipped_one_by_one(cluster: sr.LocalCluster, log: Path) -> None:
    sets = ["train.batch_size=384", "train.row_optimizer={kind: sgd, lr: 1.0}"]
    start = initial(log).rows
    moved = train_served(cluster.address, log, "rows-free", *sets).rows - start
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    most = float(np.median(norms[norms > 0]))
    clipped = train_served(cluster.address, log, "rows-clipped", *sets, f"train.clip_row_norm={most}").rows - start
    np.testing.assert_allclose(clipped, moved * np.minimum(1, most / np.maximum(norms, 1e-30)), atol=1e-7)
    assert not np.allclose(clipped, moved, atol=1e-5)


@pytest.mark.parametrize("amp", ["none", "bfloat16", "float16"])
def test_a_step_with_inf_is_refused_and_counted(cluster: sr.LocalCluster, tmp_path: Path, amp: str) -> None:
    """The second of three batches is poisoned: training equals that of the other two."""
    sets = [f"train.amp={amp}", "data.shuffle_rows=0"]
    poisoned = write_log(tmp_path / "poisoned.csv", poison_at=200)
    lines = poisoned.read_text().splitlines(keepends=True)
    (tmp_path / "rest.csv").write_text("".join(lines[:128] + lines[256:]))
    served = train_served(cluster.address, poisoned, f"skip-{amp}", *sets, "train.on_nonfinite=skip")
    assert served.result is not None, served.error
    assert served.result.refused_steps == 1
    assert served.result.history[0].samples == 256
    reference = train_plainly(tmp_path / "rest.csv", *sets)
    served.assert_close(reference, 1e-6 if amp == "none" else 1e-4)  # a scaler's scale is halved by the refusal

    raised = train_served(cluster.address, poisoned, f"raise-{amp}", *sets)
    assert "the loss is" in raised.error
    assert "after 128 samples" in raised.error
    only_first = tmp_path / "first.csv"
    only_first.write_text("".join(lines[:128]))
    raised.assert_close(train_plainly(only_first, *sets))


def test_every_step_refused_is_an_error(log: Path, tmp_path: Path) -> None:
    poisoned = write_log(tmp_path / "poisoned.csv", rows=20, poison_at=3)
    with pytest.raises(sr.errors.InvalidArgument, match="all 1 steps were refused"):
        train_plainly(poisoned, "train.on_nonfinite=skip")


def test_zero_needs_two_workers(log: Path) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=r"train\.parallel\.shard: optimizer needs at least 2 workers"):
        train_plainly(log, "train.parallel={shard: optimizer}")


PAIRS = {  # job -> (options, the plain job that it equals)
    "accumulate": (["train.batch_size=32", "train.accumulate=4"], []),
    "zero": (["train.parallel={shard: optimizer}"], []),
    "all": (
        ["train.parallel={shard: optimizer}", "train.batch_size=16", "train.accumulate=8", "train.clip_norm=0.02"],
        ["train.clip_norm=0.02"],
    ),
}


def train_rank(rank: int, address: str, folder: str) -> None:
    """One of two workers: every job of ``PAIRS``, served and plain, then the poisoned one."""
    torch.set_num_threads(1)
    log, poisoned = Path(folder) / "log.csv", Path(folder) / "poisoned.csv"
    reduced: list[int] = []

    def count_reductions(group, bucket):  # DDP reads annotations, and these are strings here
        reduced.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    figures = {}
    with joined_group(rank, 2, f"file://{folder}/meet") as group:
        states = {}
        for name, (served_sets, plain_sets) in PAIRS.items():
            reduced.clear()
            hook = count_reductions if name == "accumulate" else None
            states[name] = train_served(address, log, f"two-{name}", *served_sets, group=group, hook=hook)
            states[f"{name}-plain"] = train_plainly(log, *plain_sets, group=group)
            figures[f"{name}-reductions"] = reduced.count(0)
        figures["zero-states"] = len(states["zero"].trainer._backend.optimizers[0].optim.state)
        states["plain-accumulate"] = train_plainly(log, *PAIRS["accumulate"][0], group=group)
        ragged = Path(folder) / "ragged.csv"  # rank 1 has a single micro-batch where rank 0 has four
        for name, sets in {"ragged": PAIRS["accumulate"][0], "ragged-whole": []}.items():
            states[name] = train_served(address, ragged, f"two-{name}", *RAGGED, *sets, group=group)
        for name, sets in UNEVEN.items():
            states[name] = train_served(address, ragged, f"two-{name}", *sets, group=group)
            states[f"{name}-plain"] = train_plainly(ragged, *sets, group=group)
        for policy in ("skip", "raise"):
            sets = ["data.shuffle_rows=0", f"train.on_nonfinite={policy}"]
            states[policy] = train_served(address, poisoned, f"two-{policy}", *sets, group=group)
        states["skip-plain"] = train_plainly(poisoned, "data.shuffle_rows=0", "train.on_nonfinite=skip", group=group)
        plain = {name: (s.dense, s.rows, s.result, s.error) for name, s in states.items()}
        torch.save((plain, figures), f"{folder}/rank{rank}.pt")


RAGGED = ["data.shuffle_rows=0", "data.on_bad_line=skip"]
# Steps in which one worker has more samples: for bad lines, and for negatives that are left out.
LINEAR = ["train.row_optimizer={kind: sgd, lr: 0.1}", "train.dense_optimizer={kind: sgd, lr: 0.1}", "train.epochs=3"]
UNEVEN = {
    "uneven-lines": [*RAGGED, *LINEAR],
    "uneven-parts": [*RAGGED, *LINEAR, "train.batch_size=32", "train.accumulate=4"],
    "uneven-negatives": [*RAGGED, *LINEAR, "data.negatives_keep=0.3"],
}


@dataclass(frozen=True)
class Ranks:
    """What both workers saved, by rank."""

    log: Path
    states: list[dict[str, State]]
    figures: list[dict[str, int]]


@pytest.fixture(scope="module")
def pair(cluster: sr.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("pair")
    log = write_log(folder / "log.csv")
    write_log(folder / "poisoned.csv", rows=768, poison_at=500)  # rank 1 reads it
    lines = log.read_text().splitlines(keepends=True)[:256]
    (folder / "ragged.csv").write_text("".join(line if at < 148 else "bad\n" for at, line in enumerate(lines)))
    run_ranks(__file__, 2, cluster.address, folder)
    saved = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    states = [{name: State(*parts) for name, parts in plain.items()} for plain, _ in saved]
    return Ranks(log, states, [figures for _, figures in saved])


@pytest.mark.parametrize("name", PAIRS)
def test_two_workers_equal_plain_torch(pair: Ranks, name: str) -> None:
    for states in pair.states:
        assert states[name].result is not None, states[name].error
        states[name].assert_close(states[f"{name}-plain"])
        assert states[name].differs(initial(pair.log))


def test_micro_batches_are_reduced_once_a_step(pair: Ranks) -> None:
    assert [figures["accumulate-reductions"] for figures in pair.figures] == [2, 2]  # 192 samples each: 128 and 64
    pair.states[0]["plain-accumulate"].assert_close(pair.states[0]["accumulate-plain"])


def test_workers_may_have_unequal_numbers_of_micro_batches(pair: Ranks) -> None:
    for states in pair.states:
        assert states["ragged"].result is not None, states["ragged"].error
        assert states["ragged"].result.history[0].samples == 148
        states["ragged"].assert_close(states["ragged-whole"])
        assert states["ragged"].differs(initial(pair.log))


@pytest.mark.parametrize("name", UNEVEN)
def test_a_sample_counts_alike_in_a_short_batch(cluster: sr.LocalCluster, pair: Ranks, name: str) -> None:
    """One worker has a batch of what the two have together, in each step, and both are plain torch's."""
    log = pair.log.parent / "ragged.csv"
    sets = [each for each in UNEVEN[name] if "batch_size" not in each and "accumulate" not in each]
    alone = train_served(cluster.address, log, f"one-{name}", *sets, "train.batch_size=256")
    for states in pair.states:
        assert states[name].result is not None, states[name].error
        states[name].assert_close(alone, 1e-5)
        states[f"{name}-plain"].assert_close(alone, 1e-5)
        assert states[name].differs(initial(pair.log))


def test_zero_shares_the_dense_state_out(pair: Ranks) -> None:
    first, second = (figures["zero-states"] for figures in pair.figures)
    assert min(first, second) > 0
    assert first + second == len(initial(pair.log).dense)


def test_one_workers_inf_refuses_the_step_of_both(pair: Ranks) -> None:
    first, second = pair.states
    for states in pair.states:
        assert states["skip"].result is not None, states["skip"].error
        assert (states["skip"].result.refused_steps, states["skip"].result.history[0].samples) == (1, 512)
        states["skip"].assert_close(first["skip-plain"])
        assert states["raise"].result is None
        assert not np.array_equal(states["raise"].rows, initial(pair.log).rows)  # an earlier step was taken
    assert "the loss is" in second["raise"].error
    assert first["raise"].error.startswith("NonFiniteGradient: a dense gradient is not finite")  # by the allreduce
    np.testing.assert_array_equal(first["raise"].rows, second["raise"].rows)


def test_a_trainer_begins_its_schedule_at_the_jobs_clock(tmp_path: Path) -> None:
    write_click_log(tmp_path, rows=320, test_rows=64)
    sets = [
        "name=joins",
        f"data.train={tmp_path / 'train.tsv'}",
        f"data.test={tmp_path / 'test.tsv'}",
        "model={class: DLRM, args: {rows: {'*': 100}, dim: 4, bottom: [4], top: [4]}, min_rows: 1}",
        "train={batch_size: 32, schedule: {kind: linear, total_steps: 1000}, row_optimizer: {kind: sgd, lr: 1.0}}",
    ]
    job = load_config(JobConfig, None, sets)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, namespace="joins", staleness=0) as session:
        trainer = Trainer(
            job, group=WorkerGroup(), backend=PsBackend(job, session, cluster.address), observer=Silence()
        )
        session.core.native.skip_to(900)  # as of a worker that has joined a job which has done so many steps
        trainer.run()
        assert session.current_step == 910
        assert list(session.core.learning_rates().values()) == pytest.approx([1 - 910 / 1000] * 26)


if __name__ == "__main__":  # one worker of the test with two
    train_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])
