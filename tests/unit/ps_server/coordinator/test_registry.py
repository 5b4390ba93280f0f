"""The coordinator's table registry: ids, idempotence, differing schemas, collisions."""

from __future__ import annotations

import dataclasses

import pytest

from sparserow.proto.errors import FailedPrecondition, InvalidArgument, NotFound
from sparserow.proto.names import id_of_name
from sparserow.proto.optim import SGD, Adagrad, Adam
from sparserow.proto.schema import Constant, RowPolicy, TableSchema, Uniform
from sparserow.ps_server.coordinator.state import registry as registry_module
from sparserow.ps_server.coordinator.state.registry import Registry

SCHEMA = TableSchema("ads", "user", 16, Adagrad(lr=0.1), init=Uniform(-0.1, 0.1), seed=7)


def test_ids_are_the_documented_hash() -> None:
    # Golden: the low half of XXH3-64, which a stored cluster depends on.
    assert id_of_name("ads/user") == 3748989675
    schema, created = Registry().admit(SCHEMA)
    assert created
    assert (schema.id, schema.version) == (3748989675, 1)


def test_the_same_schema_is_found_again_and_its_first_learning_rate_stays() -> None:
    registry = Registry()
    first, _ = registry.admit(SCHEMA)
    again, created = registry.admit(dataclasses.replace(SCHEMA, optimizer=Adagrad(lr=9.0)))
    assert not created
    assert again == first


@pytest.mark.parametrize(
    ("change", "field", "old", "new"),
    [
        ({"dim": 32}, "dim", "16", "32"),
        ({"dtype": "bfloat16"}, "dtype", "float32", "bfloat16"),
        ({"seed": 8}, "seed", "7", "8"),
        ({"init": Constant(1.0)}, "init", "Uniform", "Constant"),
        ({"init": Uniform(-0.1, 0.2)}, "init.high", "0.1", "0.2"),
        ({"optimizer": Adam()}, "optimizer", "Adagrad", "Adam"),
        ({"optimizer": Adagrad(eps=1e-3)}, "optimizer.eps", "1e-10", "0.001"),
        ({"policy": RowPolicy(admit_after=3)}, "policy.admit_after", "1", "3"),
        ({"policy": RowPolicy(max_rows=2**24 + 1)}, "policy.max_rows", "0", "16777217"),
        ({"policy": RowPolicy(evict_by="lfu", max_rows=1)}, "policy.max_rows", "0", "1"),
    ],
)
def test_a_differing_schema_is_refused_by_field_and_both_values(change, field, old, new) -> None:
    registry = Registry()
    first, _ = registry.admit(SCHEMA)
    with pytest.raises(FailedPrecondition) as caught:
        registry.admit(dataclasses.replace(SCHEMA, **change))
    message = str(caught.value)
    assert f"with {field} " in message
    assert old in message
    assert new in message
    assert registry.tables() == [first]


def test_hyper_parameters_are_compared_as_shards_hold_them() -> None:
    registry = Registry()
    registry.admit(dataclasses.replace(SCHEMA, optimizer=SGD(momentum=0.9)))
    _, created = registry.admit(dataclasses.replace(SCHEMA, optimizer=SGD(momentum=0.9 + 1e-12)))
    assert not created


def test_an_id_collision_is_refused_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "id_of_name", lambda _: 5)
    registry = Registry()
    registry.admit(dataclasses.replace(SCHEMA, namespace="ads"))
    with pytest.raises(FailedPrecondition, match=r"ads/item hashes to the id of another table \(5\)"):
        registry.admit(dataclasses.replace(SCHEMA, name="item"))
    with pytest.raises(FailedPrecondition, match="'shop' hashes to the id of another one"):
        registry.namespace_id("shop")


def test_an_unknown_table_suggests_the_nearest_and_a_removed_one_is_gone() -> None:
    registry = Registry()
    schema, _ = registry.admit(SCHEMA)
    with pytest.raises(NotFound, match=r"no table ads/usr; did you mean ads/user\?"):
        registry.find("ads", "usr")
    assert registry.find("ads", "user") == schema
    registry.remove(schema.id)
    with pytest.raises(NotFound):
        registry.find("ads", "user")


def test_tables_are_listed_by_namespace_and_namespaces_are_recorded() -> None:
    registry = Registry()
    for namespace, name in (("b", "y"), ("a", "z"), ("a", "x")):
        registry.admit(dataclasses.replace(SCHEMA, namespace=namespace, name=name))
    registry.namespace_id("c")
    assert [table.full_name for table in registry.tables()] == ["a/x", "a/z", "b/y"]
    assert [table.full_name for table in registry.tables("a")] == ["a/x", "a/z"]
    assert registry.namespaces() == ["a", "b", "c"]
    with pytest.raises(InvalidArgument, match="namespace: 'x/y' is not allowed"):
        registry.namespace_id("x/y")
