"""Schemas and errors over the control plane: nothing is lost, nothing broken gets through."""

from __future__ import annotations

import grpc
import pytest

from sparserow.proto import control_pb2 as pb, errors
from sparserow.proto.control import ControlClient
from sparserow.proto.coordinators import parse_address
from sparserow.proto.errors import InvalidArgument, SparserowError, Unavailable
from sparserow.proto.grpc_status import error_of_status, status_of_error
from sparserow.proto.optim import (
    FTRL,
    LAMB,
    OPTIMIZERS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    RMSprop,
    RowWiseAdagrad,
)
from sparserow.proto.schema import Constant, Normal, RowPolicy, TableSchema, Uniform, XavierNormal, XavierUniform
from sparserow.proto.schema_message import message_of_schema, schema_of_message

EXAMPLES = [
    SGD(0.0, momentum=0.9, nesterov=True),
    Adagrad(eps=1e-7, decoupled=True),
    Adagrad(accumulator_decay=0.5),
    RowWiseAdagrad(weight_decay=0.1, accumulator_decay=0.25),
    Adam(betas=(0.9, 0)),
    AdamW(amsgrad=True),
    RMSprop(alpha=0.5, momentum=0.25, centered=True),
    Adadelta(rho=0.25, weight_decay=0.5),
    Lion(betas=(0.9, 0.5), decoupled=False),
    LAMB(betas=(0.5, 0.999), weight_decay=0.25),
    FTRL(beta=0.5, l1=0.25, l2=0.125, group_lasso=2.0, weight_decay=0.5, decoupled=True),
]
INITS = [Constant(), Uniform(-1, 1), Normal(0.5, 0), XavierUniform(2**40), XavierNormal(7, gain=2.5)]


@pytest.mark.parametrize("optimizer", EXAMPLES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("init", INITS, ids=lambda value: type(value).__name__)
def test_schemas_survive_the_wire(optimizer, init) -> None:
    schema = TableSchema(
        "a", "t\u00e4ble", 16384, optimizer, dtype="float16", init=init, seed=2**64 - 1, id=9, version=2
    )
    wire = message_of_schema(schema).SerializeToString()
    assert schema_of_message(pb.TableSchema.FromString(wire)) == schema


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_of_an_older_program_has_the_defaults_of_newer_options(kind: str) -> None:
    """Checkpoints and the coordinator's state hold such messages."""
    schema = TableSchema("a", "t", 4, OPTIMIZERS[kind](decoupled=False))
    wire = message_of_schema(schema).SerializeToString()
    inner = getattr(pb.TableSchema.FromString(wire).optimizer, kind)
    newer = {"decoupled", "accumulator_decay", "amsgrad"} & {field.name for field, _ in inner.ListFields()}
    assert newer == set(), "a default is not written, so that an older program reads the message as ever"
    assert schema_of_message(pb.TableSchema.FromString(wire)).optimizer == schema.optimizer


@pytest.mark.parametrize(
    "policy",
    [
        RowPolicy(),
        RowPolicy(admit_after=3, admit_capacity=5, evict_after_steps=7, evict_after_seconds=9),
        RowPolicy(admit_probability=0.25, evict_below_norm=1e-3, max_rows=2**40, evict_by="lfu", ram_share=0.5),
        RowPolicy(max_bytes=2**50),
    ],
)
def test_policies_survive_the_wire(policy) -> None:
    schema = TableSchema("a", "t", 4, Adagrad(), policy=policy)
    message = message_of_schema(schema)
    assert schema_of_message(pb.TableSchema.FromString(message.SerializeToString())) == schema
    assert message.HasField("policy") == (policy != RowPolicy())  # what older peers sent has none


def test_a_policy_that_breaks_the_contract_is_refused() -> None:
    message = message_of_schema(TableSchema("a", "t", 4, Adagrad(), policy=RowPolicy(admit_after=2)))
    message.policy.evict_by = 7
    with pytest.raises(InvalidArgument, match="evict_by: 7 is not allowed; allowed: lru, lfu"):
        schema_of_message(message)
    message.policy.evict_by = 0
    message.policy.admit_after = 0
    with pytest.raises(InvalidArgument, match="admit_after: 0 is not allowed; allowed: 1 to 255"):
        schema_of_message(message)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.ClearField("optimizer"), "TableSchema.optimizer: is missing"),
        (lambda m: m.ClearField("init"), "TableSchema.init: is missing"),
        (lambda m: setattr(m, "dim", 0), "TableSchema.dim: 0 is not allowed"),
        (lambda m: setattr(m, "dtype", 7), "TableSchema.dtype: 7 is not allowed"),
        (lambda m: setattr(m, "name", "a/b"), "TableSchema.name: 'a/b' is not allowed"),
        (lambda m: m.optimizer.adam.betas.append(0.5), r"Adam.betas: \(0.9, 0.999, 0.5\) is not allowed"),
    ],
)
def test_a_broken_message_is_refused_by_field(change, words: str) -> None:
    message = message_of_schema(TableSchema("a", "t", 4, Adam()))
    change(message)
    with pytest.raises(InvalidArgument, match=words):
        schema_of_message(message)


class FakeRpcError(grpc.RpcError):
    def __init__(self, code, details, metadata=()):
        self._parts = (code, details, metadata)

    def code(self):
        return self._parts[0]

    def details(self):
        return self._parts[1]

    def trailing_metadata(self):
        return self._parts[2]


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SparserowError)]


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.__name__)
def test_every_error_survives_the_wire(kind: type[SparserowError]) -> None:
    error = error_of_status(FakeRpcError(*status_of_error(kind("what; do this"))), "peer")
    assert type(error) is kind
    assert str(error) == "what; do this"


def test_an_error_of_the_transport_names_the_peer() -> None:
    details = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:5: "
        "Failed to connect to remote host: Connection refused"
    )
    error = error_of_status(FakeRpcError(grpc.StatusCode.UNAVAILABLE, details), "coordinator h:1", remedy="; start it")
    assert type(error) is Unavailable
    assert str(error) == "coordinator h:1 cannot be reached: Connection refused; start it"
    ended = error_of_status(FakeRpcError(grpc.StatusCode.CANCELLED, "CANCELLED"), "shard 1")
    assert (ended.code, str(ended)) == ("Unavailable", "shard 1 ended before it answered")
    late = error_of_status(FakeRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, ""), "shard 1")
    assert late.code == "DeadlineExceeded"
    assert "shard 1" in str(late)
    assert error_of_status(FakeRpcError(grpc.StatusCode.UNKNOWN, "x"), "p").code == "Internal"


@pytest.mark.parametrize("address", ["", "host", "host:", ":7000", "host:0", "host:99999", "host:port"])
def test_an_address_must_be_host_and_port(address: str) -> None:
    with pytest.raises(InvalidArgument, match="allowed: HOST:PORT"):
        ControlClient(address)


def test_addresses() -> None:
    assert parse_address("[::1]:7000") == ("::1", 7000)
    assert parse_address("h:7000") == ("h", 7000)


@pytest.mark.parametrize(
    "change", [{"rank": -1}, {"world_size": 0}, {"staleness": -1}, {"grad_scale": "max"}, {"rank": 2**33}]
)
def test_a_worker_cannot_register_with_values_out_of_range(change) -> None:
    arguments = {"namespace": "a", "job": "j", "rank": 0, "world_size": 1, **change}
    with ControlClient("127.0.0.1:1") as client, pytest.raises(InvalidArgument):
        client.register_worker(**arguments)
