"""One log as text and as Parquet files of any sizes, read by workers that are killed: each sample comes once."""

from __future__ import annotations

import json
import os
import random
import secrets
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from column_uses import data_of
from long_form import FULL
from sparserow.proto.config.data_config import DataConfig
from sparserow.worker.data import Batch, ClickReader, ReadOptions
from sparserow.worker.data.line_windows import read_runs
from sparserow.worker.data.sources import fit_features, lines, open_reader, plan_files

ROWS = 2_000
FORMS = ("text", "text.gz", 1, 7, 23)
ROLES = "{label: y, numeric: {x: none, f: log}, categorical: [c, k], buckets: {f: 16}}"


def write_log(folder: Path, draw: random.Random) -> dict[object, tuple[DataConfig, tuple]]:
    """The forms of a log, each with its plan. ``x`` is the number of a sample."""
    table = pa.table(
        {
            "y": pa.array([draw.randrange(2) for _ in range(ROWS)], pa.int8()),
            "x": pa.array(range(ROWS), pa.int32()),
            "f": pa.array([None if draw.random() < 0.1 else draw.gauss(0, 9) for _ in range(ROWS)], pa.float64()),
            "c": pa.array([None if draw.random() < 0.1 else draw.choice("abcdé") * 3 for _ in range(ROWS)]),
            "k": pa.array([draw.randrange(-50, 50) for _ in range(ROWS)], pa.int64()),
        }
    )
    text = "y,x,f,c,k\n" + "".join(
        f"{row['y']},{row['x']},{'' if row['f'] is None else repr(row['f'])},{row['c'] or ''},{row['k']}\n"
        for row in table.to_pylist()
    )
    forms = {}
    for form in FORMS:
        path = folder / f"{form}"
        if isinstance(form, str):
            import gzip

            path.write_bytes(gzip.compress(text.encode()) if form.endswith(".gz") else text.encode())
            section = ["format=csv", f"csv={{header: true, {ROLES[1:]}"]
        else:
            path.mkdir()
            cuts = sorted(draw.randrange(ROWS + 1) for _ in range(form - 1))  # some files may be empty
            for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, ROWS], strict=True)):
                size = draw.choice([50, 137, 5000])
                pq.write_table(table.slice(begin, end - begin), path / f"{number:02}.parquet", row_group_size=size)
            section = ["format=parquet", f"columns={ROLES}"]
        config = data_of(f"train={path}", f"test={path}", *section)
        forms[form] = (config, plan_files(config, "train"))
    return forms


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))


@pytest.fixture(scope="module")
def forms(tmp_path_factory, seed):
    with pytest.MonkeyPatch.context() as patch:  # so that a text has several parts
        patch.setattr(lines, "read_runs", lambda path, begin: read_runs(path, begin, 8_000))
        return write_log(tmp_path_factory.mktemp("logs"), random.Random(seed))


def samples(batches: list[Batch]) -> Counter:
    return Counter(
        (*dense, *sparse, label)
        for batch in batches
        for dense, sparse, label in zip(
            batch.dense.numpy().tolist(), batch.sparse.numpy().tolist(), batch.labels.tolist(), strict=True
        )
    )


def same(one: Batch, other: Batch) -> bool:
    return all(
        np.array_equal(getattr(one, name).numpy(), getattr(other, name).numpy())
        for name in ("dense", "sparse", "labels")
    )


class Job:
    """The readers of all workers of a job; they take batches in turn."""

    def __init__(self, form, features, world: int, options: dict) -> None:
        self.readers: list[ClickReader] = [
            open_reader(form[0], "train", features, ReadOptions(rank=rank, world=world, **options), form[1])
            for rank in range(world)
        ]
        self.passes = [iter(reader) for reader in self.readers]

    def states(self) -> list[dict]:
        return json.loads(json.dumps([reader.state_dict() for reader in self.readers]))

    def resume(self, states: list[dict]) -> None:
        for rank, reader in enumerate(self.readers):
            mine = states[rank] if rank < len(states) else None
            if reader.goes_on_from(mine):
                reader.load_state_dict(mine)
            else:
                reader.load_state_dicts(states)
        self.passes = [iter(reader) for reader in self.readers]

    def step(self, rank: int) -> Batch | None:
        return next(self.passes[rank], None)

    def together(self, most: int = 10**9, *, is_level: bool = True) -> list[list[Batch]]:
        """Up to ``most`` steps of all workers, by rank; all end together where they began together."""
        taken: list[list[Batch]] = [[] for _ in self.readers]
        for _ in range(most):
            step = [self.step(rank) for rank in range(len(self.readers))]
            if is_level:
                assert len({batch is None for batch in step}) == 1, "all workers have the same number of steps"
            for mine, batch in zip(taken, step, strict=True):
                mine += [] if batch is None else [batch]
            if all(batch is None for batch in step):
                break
        return taken


@pytest.mark.parametrize("number", range(400 if FULL else 25))
def test_each_sample_comes_once_whatever_is_killed(forms, seed, number):
    draw = random.Random(seed + number)
    print(f"SPARSEROW_TEST_SEED={seed}, case {number}")
    form = forms[FORMS[number % len(FORMS)]]
    features = fit_features(*forms["text"])
    expected = samples(
        list(open_reader(forms["text"][0], "train", features, ReadOptions(batch_size=999), forms["text"][1]))
    )
    assert sum(expected.values()) == len(expected) == ROWS
    shuffle = draw.random() < 0.7
    options = {"shuffle": shuffle, "shuffle_rows": draw.choice([1, 64, 500, 9999]), "seed": draw.randrange(99)}
    options |= {"batch_size": draw.choice([7, 64, 300]), "in_order": draw.random() < 0.7}
    if options["shuffle_rows"] == 1:
        options["batch_size"] = 300  # each window costs time
    world = draw.randrange(1, 6)
    undisturbed = Job(form, features, world, options).together()
    assert samples([batch for mine in undisturbed for batch in mine]) == expected

    job, done, is_same, is_level = Job(form, features, world, options), [[] for _ in range(world)], True, True
    before: list[Batch] = []
    for _ in range(draw.randrange(1, 4)):
        most = draw.randrange(len(undisturbed[0]) + 2)
        for mine, more in zip(done, job.together(most, is_level=is_level), strict=True):
            mine.extend(more)
        is_ragged = draw.random() < 0.3 and not options["shuffle"]
        if is_ragged:  # workers that do not wait for each other
            is_level = False
            for rank in range(world):
                for _ in range(draw.randrange(3)):
                    batch = job.step(rank)
                    done[rank] += [] if batch is None else [batch]
        states = job.states()
        if len({state["epoch"] for state in states}) > 1 or states[0]["epoch"]:
            return  # the epoch had ended
        if draw.random() < 0.5 or is_ragged:
            world = draw.randrange(1, 6)
            if world != len(states):
                is_same, is_level = False, True  # what is left is dealt anew
                options["batch_size"] = draw.choice([7, 64, 300])
                before += [batch for mine in done for batch in mine]
                done = [[] for _ in range(world)]
        job = Job(form, features, world, options)
        job.resume(states)
    rest = job.together(is_level=is_level)
    for mine, more in zip(done, rest, strict=True):
        mine.extend(more)
    assert samples([*before, *(batch for mine in done for batch in mine)]) == expected
    if is_same:
        for mine, whole in zip(done, undisturbed, strict=True):
            assert len(mine) == len(whole)
            assert all(same(one, other) for one, other in zip(mine, whole, strict=True))


def test_text_and_parquet_have_the_same_ids_bit_for_bit(forms):
    features = {form: fit_features(*forms[form]) for form in FORMS}
    read = {
        form: list(open_reader(forms[form][0], "train", features[form], ReadOptions(batch_size=512), forms[form][1]))
        for form in FORMS
    }
    for form in FORMS:
        assert features[form].spec == features["text"].spec
        assert all(same(one, other) for one, other in zip(read[form], read["text"], strict=True)), form


def test_every_epoch_has_an_order_of_its_own_that_workers_do_not_change(forms):
    form, features = forms[7], fit_features(*forms[7])
    options = {"shuffle": True, "shuffle_rows": 500, "batch_size": 50, "seed": 3}

    def order(world: int, epochs: int) -> list[list[int]]:
        readers = Job(form, features, world, options).readers
        return [[int(x) for reader in readers for batch in reader for x in batch.dense[:, 0]] for _ in range(epochs)]

    alone = order(1, 2)
    assert alone[0] != alone[1]
    assert alone == order(4, 2)  # a worker has a run of the order
