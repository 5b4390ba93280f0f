"""Rows of every optimizer in a store: beside an SSD, carried to another store, and FTRL's state that follows weights.

Their arithmetic is compared with torch and the papers in tests/contract/test_optimizers.py.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from sparserow.cpp_ext import _server
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import error_of
from sparserow.proto.native import optimizer_parameters
from sparserow.proto.optim import FTRL, OPTIMIZERS, SGD, Adagrad, Adam, RMSprop, RowOptimizer, RowWiseAdagrad
from sparserow.proto.options.document import load_config
from sparserow.proto.schema import Constant, Init
from sparserow.ps_server.shard.native_schema import native_optimizer
from sparserow.worker.checkpoint.device_parts import saved_facts
from sparserow.worker.training.job_tables import JobTables

TABLE, DIM, KEYS = 1, 8, 3_000
EVERY = [
    *(kind() for kind in OPTIMIZERS.values()),
    SGD(momentum=0.9),
    Adam(amsgrad=True),
    RMSprop(momentum=0.9, centered=True),
    FTRL(l1=0.2, group_lasso=0.1),
]
FTRLS = [FTRL(l1=0.5), FTRL(l1=0.2, l2=0.3), FTRL(l1=0.1, l2=0.3, group_lasso=0.3)]
UNIFORM = _server.InitSpec(kind="uniform", a=-0.5, b=0.5)


def make_store(optimizer: RowOptimizer, dtype: str = "float32", **options: object) -> _server.Store:
    _server.set_error_factory(error_of)
    store = _server.Store(**options)
    store.create_table(
        _server.TableSchema(
            id=TABLE,
            name="n/t",
            dim=DIM,
            dtype=dtype,  # type: ignore[arg-type]
            seed=3,
            init=UNIFORM,
            optimizer=native_optimizer(optimizer),
        )
    )
    return store


def train(store: _server.Store, seed: int, *, steps: int = 8, batch: int = KEYS // 4, keys: int = KEYS) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        some = np.unique(random.integers(keys, size=batch)).astype(np.uint64)
        store.apply(TABLE, some, random.standard_normal((len(some), DIM), np.float32), lr=0.05)


def weights_of(store: _server.Store, keys: int = KEYS) -> np.ndarray:
    return store.pull(TABLE, np.arange(keys, dtype=np.uint64))[0]


def rows_of(store: _server.Store) -> tuple[np.ndarray, ...]:
    """Returns keys, versions, update counts, weights and state, ordered by key."""
    pages, cursor = [], 0
    while not pages or cursor:
        *page, cursor = store.scan(TABLE, cursor=cursor, with_state=True)
        pages.append(page)
    columns = [np.concatenate(each) for each in zip(*pages, strict=True)]
    order = np.argsort(columns[0])
    return tuple(each[order] for each in columns)


@pytest.mark.parametrize("optimizer", EVERY, ids=lambda each: each.state_layout)
def test_rows_that_leave_for_the_ssd_come_back_bit_for_bit(optimizer: RowOptimizer, tmp_path: Path) -> None:
    tiered = make_store(optimizer, memory_budget_bytes=512 << 10, slot_count=4, ssd_path=str(tmp_path), cluster_id=9)
    plain = make_store(optimizer, slot_count=4)
    for store in (tiered, plain):
        train(store, seed=5, steps=60, batch=200, keys=10_000)
    assert tiered.stats()[0].ssd_rows > 0
    for ours, theirs in zip(rows_of(tiered)[2:], rows_of(plain)[2:], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("optimizer", EVERY, ids=lambda each: each.state_layout)
def test_rows_with_their_state_go_on_in_another_store(optimizer: RowOptimizer) -> None:
    first, second = make_store(optimizer), make_store(optimizer)
    train(first, seed=5)
    keys, versions, counts, weights, state = rows_of(first)
    assert state.shape == (len(keys), optimizer.state_floats(DIM))
    second.install(TABLE, keys, versions, counts, weights, state)
    for store in (first, second):
        train(store, seed=6)
    np.testing.assert_array_equal(weights_of(first), weights_of(second))


def push_zeros(store: _server.Store) -> None:
    keys = np.arange(KEYS, dtype=np.uint64)
    for lr in (0.05, 0.5, 0.001):
        store.apply(TABLE, keys, np.zeros((KEYS, DIM), np.float32), lr=lr)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", FTRLS, ids=str)
@pytest.mark.parametrize("how", ["created", "trained", "assigned", "imported", "reset"])
def test_a_gradient_of_zero_changes_no_bit_of_ftrl(optimizer: FTRL, how: str, dtype: str) -> None:
    store = make_store(optimizer, dtype)
    if how != "created":
        train(store, seed=5)
    if how == "assigned":
        rows = np.random.default_rng(6).standard_normal((KEYS, DIM), np.float32)
        rows[::3, ::2] = 0.0
        store.assign(TABLE, np.arange(KEYS, dtype=np.uint64), rows)
    if how in ("imported", "reset"):
        other = make_store(optimizer, dtype)
        keys, versions, counts, weights, state = rows_of(store)
        stored = weights.astype(np.float16) if dtype == "float16" else weights
        stored = (weights.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else stored
        other.install(TABLE, keys, versions, counts, stored, state if how == "imported" else state[:0])
        store = other
    before = weights_of(store)
    assert np.count_nonzero(before) > 0
    push_zeros(store)
    np.testing.assert_array_equal(weights_of(store), before)
    # A gradient of almost nothing changes almost nothing.
    store.apply(TABLE, np.arange(KEYS, dtype=np.uint64), np.full((KEYS, DIM), 1e-6, np.float32), lr=0.05)
    if dtype == "float32":
        np.testing.assert_allclose(weights_of(store), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", [SGD(), Adagrad(), RowWiseAdagrad(), Adam()], ids=lambda each: each.kind)
def test_a_part_of_a_device_table_that_an_older_program_saved_has_the_same_optimizer(optimizer: RowOptimizer) -> None:
    kind, options = optimizer_parameters(optimizer)
    newer = {"decoupled", "accumulator_decay", "amsgrad"}
    saved = {"kind": kind, **{name: value for name, value in options.items() if name not in newer}}
    assert saved_facts(saved) == {"kind": kind, **options}
    assert saved_facts({**saved, "weight_decay": 0.5}) != {"kind": kind, **options}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["train.row_optimizer={kind: ftrl, l1: 1}"], Constant(0.0)),
        (["train.row_optimizer={kind: ftrl, group_lasso: 1}"], Constant(0.0)),
        (["train.row_optimizer={kind: ftrl, l2: 1}"], None),
        (["train.row_optimizer={kind: ftrl, l1: 1}", "model.args.init_scale=0.5"], None),
        (["train.row_optimizer={kind: ftrl, l1: 1}", "model.class=any:Net"], None),
        (["tables={'*.a': {optimizer: {kind: ftrl, l1: 1}}}"], Constant(0.0)),
        (["tables={'*.a': {optimizer: {kind: adam}}}", "train.row_optimizer={kind: ftrl, l1: 1}"], None),
    ],
)
def test_a_job_with_l1_begins_with_zeros_unless_it_says_a_scale(settings: list[str], wanted: Init | None) -> None:
    base = [
        "data.train=a",
        "data.test=b",
        "model={class: DLRM, args: {rows: {'*': 1000000}}}",
        "model.min_rows=1",
    ]
    job = load_config(JobConfig, None, [*base, *settings])
    model = nn.Module()
    model.tables = nn.ModuleDict({"a": nn.Embedding(200, DIM)})
    holder = nn.Module()
    holder.embeddings = model
    options = JobTables(job, holder).options(None)
    table = next(each for pattern, each in options.items() if fnmatch.fnmatchcase("embeddings.tables.a", pattern))
    assert table.init == wanted


def test_zeros_that_are_assigned_forget_the_gradients_before_them() -> None:
    """L1 keeps a weight at 0 until its gradients sum up to more than l1."""
    store, keys = make_store(FTRL(l1=1.0)), np.arange(2, dtype=np.uint64)
    zeros = np.zeros((2, DIM), np.float32)
    store.assign(TABLE, keys, zeros)
    store.apply(TABLE, keys, zeros + 0.8, lr=0.05)
    store.assign(TABLE, keys[:1], zeros[:1])
    store.apply(TABLE, keys, zeros + 0.8, lr=0.05)
    weights = store.pull(TABLE, keys)[0]
    assert (weights[0] == 0).all()
    assert (weights[1] < 0).all()


def test_group_lasso_makes_whole_rows_zero_and_l1_single_weights() -> None:
    l1, group = make_store(FTRL(l1=1.5)), make_store(FTRL(group_lasso=1.5))
    for store in (l1, group):
        store.assign(TABLE, np.arange(KEYS, dtype=np.uint64), np.zeros((KEYS, DIM), np.float32))
        train(store, seed=5)
    is_zero = weights_of(l1) == 0
    assert 0.1 < is_zero.mean() < 0.9
    assert (is_zero.any(1) & ~is_zero.all(1)).any()
    is_zero = weights_of(group) == 0
    assert 0.1 < is_zero.all(1).mean() < 0.9
    assert (is_zero.all(1) == is_zero.any(1)).all()
