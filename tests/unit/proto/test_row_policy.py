"""Policies of tables: what is refused, in Python, in a job's file and in the store; and that all three agree."""

from __future__ import annotations

import dataclasses

import pytest

import sparserow as sr
from sparserow.cpp_ext import _server
from sparserow.proto.config.table_config import TableConfig
from sparserow.proto.errors import FailedPrecondition, InvalidArgument, error_of
from sparserow.proto.native import policy_parameters
from sparserow.proto.options.document import validate
from sparserow.proto.schema import RowPolicy

BAD = [
    ({"admit_after": 0}, "admit_after"),
    ({"admit_after": 256}, "admit_after"),
    ({"admit_probability": 0.0}, "admit_probability"),
    ({"admit_probability": 1.5}, "admit_probability"),
    ({"admit_after": 2, "admit_probability": 0.5}, "admit_probability"),
    ({"admit_after": 2, "admit_capacity": 0}, "admit_capacity"),
    ({"evict_after_steps": 2**31}, "evict_after_steps"),
    ({"evict_below_norm": -1.0}, "evict_below_norm"),
    ({"evict_below_norm": float("nan")}, "evict_below_norm"),
    ({"evict_by": "lfu"}, "evict_by"),
    ({"ram_share": 0.95}, "ram_share"),
]


def native_schema(policy: dict) -> _server.TableSchema:
    return _server.TableSchema(id=1, name="n/t", dim=4, policy=policy)


@pytest.mark.parametrize(("fields", "named"), BAD)
def test_what_makes_no_sense_is_refused_everywhere(fields: dict, named: str) -> None:
    _server.set_error_factory(error_of)
    with pytest.raises(InvalidArgument, match=rf"^RowPolicy\.{named}: .*; allowed: "):
        RowPolicy(**fields)
    with pytest.raises(InvalidArgument, match=rf"^Table\.{named}: "):
        sr.Table(**fields)
    with pytest.raises(InvalidArgument, match=named):
        validate(TableConfig, fields)
    native = {**fields, "evict_by": 1} if "evict_by" in fields else fields
    with pytest.raises(InvalidArgument, match=rf"^TableSchema\.policy\.{named}: "):
        _server.Store().create_table(native_schema(native))


def test_a_capacity_that_nothing_uses_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="admit_capacity"):
        RowPolicy(admit_capacity=5)


def test_every_field_reaches_the_store_and_is_compared_there() -> None:
    _server.set_error_factory(error_of)
    changed = {
        "admit_after": 3,
        "admit_probability": 0.5,
        "admit_capacity": 7,
        "evict_after_steps": 5,
        "evict_after_seconds": 5,
        "evict_below_norm": 0.5,
        "max_rows": 9,
        "max_bytes": 9,
        "evict_by": 1,
        "ram_share": 0.5,
    }
    plain = policy_parameters(RowPolicy())
    assert set(changed) == set(plain)
    store = _server.Store()
    store.create_table(native_schema({**plain, "max_rows": 8}))
    for name, value in changed.items():
        with pytest.raises((FailedPrecondition, InvalidArgument), match=rf"policy\.{name}"):
            store.create_table(native_schema({**plain, "max_rows": 8, name: value}))
    with pytest.raises(InvalidArgument, match="has a field that RowPolicy has not"):
        native_schema({"evict_after": 1})


def test_a_jobs_section_becomes_the_policy() -> None:
    config = validate(TableConfig, {"admit_after": 4, "evict_after": "2min", "max_bytes": "1GiB", "evict_by": "lfu"})
    assert config.policy() == RowPolicy(admit_after=4, evict_after_seconds=120, max_bytes=1 << 30, evict_by="lfu")
    assert set(TableConfig.model_fields) - {
        *("evict_after", "placement", "dtype", "optimizer", "init", "frozen", "weights"),
    } == {field.name for field in dataclasses.fields(RowPolicy)} - {"evict_after_seconds"}
    assert sr.Table(max_rows=5).policy == RowPolicy(max_rows=5)


def test_a_share_of_memory_needs_an_ssd() -> None:
    _server.set_error_factory(error_of)
    with pytest.raises(FailedPrecondition, match="ram_share needs shards with an ssd_path"):
        _server.Store().create_table(native_schema({"ram_share": 0.5}))
