"""Names that come in by the control plane: each has a bound, which the error says, before a method sees the request."""

from __future__ import annotations

from typing import Any

import pytest

import sparserow as sr
from sparserow.proto import changes_pb2, control_pb2, control_pb2 as pb, rows_pb2, serving_pb2
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.request_bounds import MOST, check_bounds, parse
from sparserow.proto.request_names import NAMES, TEXTS, check_names


def request_types() -> list[Any]:
    """The descriptor of every request of our services."""
    files = (control_pb2, rows_pb2, serving_pb2, changes_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return [method.input_type for service in services for method in service.methods]


def strings_of(descriptor: Any, found: set[str]) -> set[str]:
    """Names of the fields of text of a message and of those in it."""
    for field in descriptor.fields:
        if field.type == field.TYPE_STRING:
            found.add(f"{descriptor.name}.{field.name}")
        elif field.type == field.TYPE_MESSAGE:
            strings_of(field.message_type, found)
    return found


def test_every_field_of_text_is_a_name_with_a_bound_or_a_text() -> None:
    found: set[str] = set()
    for descriptor in request_types():
        strings_of(descriptor, found)
    assert found == {*NAMES, *TEXTS}
    assert TEXTS.isdisjoint(NAMES)


def counts_of(descriptor: Any, found: set[str]) -> set[str]:
    """Names of the repeated fields, and of those of bytes, of a message and of those in it."""
    for field in descriptor.fields:
        if field.is_repeated or field.type == field.TYPE_BYTES:
            found.add(f"{descriptor.name}.{field.name}")
        if field.type == field.TYPE_MESSAGE:
            counts_of(field.message_type, found)
    return found


def test_every_repeated_field_and_every_one_of_bytes_has_a_bound() -> None:
    found: set[str] = set()
    for descriptor in request_types():
        counts_of(descriptor, found)
    assert found == set(MOST)


def test_entries_inside_of_messages_are_counted() -> None:
    many = pb.CutRequest(jobs=[pb.CutJob(workers=[pb.CutWorker()] * (MOST["CutJob.workers"] or 0))])
    check_bounds(many)
    many.jobs[0].workers.add()
    with pytest.raises(InvalidArgument, match=r"^CutJob.workers: it has 65537 entries; allowed: at most 65536"):
        check_bounds(many)
    with pytest.raises(InvalidArgument, match=r"^CheckpointCaller.proof: it has 33 bytes; allowed: at most 32"):
        check_bounds(pb.BeginSaveRequest(caller=pb.CheckpointCaller(proof=bytes(33))))


def test_entries_are_counted_before_a_message_is_parsed() -> None:
    def parser(_: bytes) -> None:
        raise AssertionError

    with pytest.raises(InvalidArgument, match=r"^Restore: it has more than \d+ fields"):
        parse("Restore", b"\x1a\x00" * (1 << 18), parser)
    for broken in (b"\xff" * (1 << 20), b"\x1a\xff\xff\xff\xff\xff", b"\x07" * (1 << 19)):
        with pytest.raises(InvalidArgument, match=r"^Restore: it is not such a message"):
            parse("Restore", broken, pb.RestoreRequest.FromString)


@pytest.mark.parametrize("field", NAMES)
def test_a_long_name_is_refused_with_its_bound(field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{field}: .*allowed: .*\d+"):
        NAMES[field](field, "x" * 5000)
    NAMES[field](field, "x" * 64)


def test_names_inside_of_messages_are_looked_at() -> None:
    check_names(pb.RestoreRequest(tables=["ads/user"], renames=[pb.TableRename(saved="ads/a", name="ads/b")]))
    for request, words in (
        (pb.RestoreRequest(tables=["ads/user", "x" * 512]), r"RestoreRequest.tables: .*at most 511"),
        (pb.RestoreRequest(renames=[pb.TableRename(saved="x" * 512)]), r"TableRename.saved: .*at most 511"),
        (pb.CreateTableRequest(schema=pb.TableSchema(name="x" * 256)), r"TableSchema.name: .*at most 255"),
        (pb.EnterSaveRequest(state=pb.WrittenFile(file="../../x")), r"WrittenFile.file: .*plain file name"),
        (pb.GetSaveRequest(name="a\nINFO forged"), r"GetSaveRequest.name: 'a\\nINFO forged'"),
        (serving_pb2.LookupRequest(tables=[serving_pb2.TableKeys(table="x" * 256)]), r"TableKeys.table: .*at most 255"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            check_names(request)


def test_a_running_coordinator_refuses_long_names() -> None:
    long = "x" * 256
    with sr.local_cluster(shards=1, slot_count=64) as cluster, ControlClient(cluster.address) as control:
        for method, request in {
            "RegisterWorker": pb.RegisterWorkerRequest(namespace="ads", job="j", host=long, world_size=1),
            "LeaseData": pb.LeaseDataRequest(run=long),
            "DropTable": pb.DropTableRequest(namespace="ads", name=long),
            "GetSave": pb.GetSaveRequest(url="/ckpt", name=long),
            "ReportFault": pb.ReportFaultRequest(host=long),
        }.items():
            with pytest.raises(InvalidArgument, match="256 characters is not allowed; allowed: at most 255 printable"):
                control._call(method, request, deadline_sec=20.0)
