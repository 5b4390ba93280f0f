"""The coordinator's list of workers that ended: what belongs together, in which order, and how much is kept."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sparserow.proto import coordinators
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import Fenced, InvalidArgument, Unavailable
from sparserow.proto.status.fault_view import fault_text, fault_views
from sparserow.proto.worker_identity import WorkerIdentity
from sparserow.ps_server.coordinator.state import faults as book_of
from sparserow.ps_server.coordinator.state.faults import (
    Fault,
    FaultBook,
    Process,
    bounded_traceback,
)
from sparserow.ps_server.coordinator.state.membership import JobTerms, Membership
from sparserow.ps_server.coordinator.status import fault_message
from sparserow.worker.membership.fault_report import is_echo, report_fault
from sparserow_process import free_port

NOW = 1_000_000.0


def process(rank: int, epoch: int = 1) -> Process:
    return Process(rank, epoch, "host", 100 * epoch + rank)


def report(book: FaultBook, rank: int, at: float, *, epoch: int = 1, echo: bool = False, job: str = "ads/ctr") -> Fault:
    return book.report(job, (1, rank + 1), process(rank, epoch), NOW + at, f"fault {rank}", "trace\n", echo)


def ranks(book: FaultBook) -> list[tuple[int, int]]:
    return [(fault.incident, fault.rank) for fault in book.listed()]


def test_the_first_fault_of_an_incident_is_first_and_echoes_are_last() -> None:
    book = FaultBook()
    report(book, 3, 0.1, echo=True)
    report(book, 0, 0.5)
    book.lease_ended("ads/ctr", (1, 3), 2, 1, NOW + 10.0, lease_sec=15.0)  # its heartbeat was due at 0.0
    report(book, 1, 0.6, echo=True)
    assert ranks(book) == [(1, 2), (1, 0), (1, 3), (1, 1)]
    text = fault_text(fault_views(map(fault_message, book.listed())))
    assert [line for line in text.splitlines() if line.startswith("+")] == [
        "+0.5 s  job ads/ctr, rank 0 on host (process 100), of the same incident",
        "+0.1 s  job ads/ctr, rank 3 on host (process 103), likely an echo",
        "+0.6 s  job ads/ctr, rank 1 on host (process 101), likely an echo",
    ]


def test_a_lease_that_ends_after_another_worker_said_why_is_an_echo() -> None:
    book = FaultBook()
    report(book, 0, 0.0)
    book.lease_ended("ads/ctr", (1, 2), 1, 1, NOW + 8.0, lease_sec=9.0)
    book.lease_ended("ads/ctr", (1, 3), 2, 1, NOW + 5.0, lease_sec=9.0)  # it was missed before that
    assert [(fault.rank, fault.echo) for fault in book.listed()] == [(2, False), (0, False), (1, True)]


def test_a_rank_that_fails_again_or_a_minute_later_is_another_incident() -> None:
    book = FaultBook()
    report(book, 0, 0.0)
    report(book, 0, 5.0, epoch=2)
    report(book, 1, 5.1, epoch=2)
    report(book, 2, 120.0)
    report(book, 0, 60.0, job="shop/cart")
    assert [(fault.job, fault.incident, fault.rank) for fault in book.listed()] == [
        ("ctr", 3, 2),
        ("cart", 1, 0),
        ("ctr", 2, 0),
        ("ctr", 2, 1),
        ("ctr", 1, 0),
    ]


@pytest.mark.parametrize("echo", [False, True])
def test_a_worker_whose_lease_ended_before_it_said_why_has_its_traceback(echo: bool) -> None:
    book = FaultBook()
    ended = book.lease_ended("ads/ctr", (1, 1), 0, 1, NOW + 10.0, lease_sec=9.0)
    report(book, 0, 11.0, echo=echo)
    (fault,) = book.listed()
    assert fault.traceback == "trace\n"
    assert fault.message == (ended.message if echo else "fault 0")
    assert (fault.time, fault.host, fault.pid) == (ended.time, "host", 100)
    report(book, 0, 12.0)
    assert book.listed() == [fault]
    assert book.seen == 1


def test_a_process_that_is_replaced_without_a_word_is_listed_once_nobody_else_has_said_why() -> None:
    book = FaultBook()
    for rank in (0, 1):
        assert book.came("ads/ctr", (1, rank + 1), process(rank), NOW) is None
    book.left((1, 1), 1)
    assert book.came("ads/ctr", (1, 1), process(0, 2), NOW) is None  # it left in order
    book.heard((1, 2), NOW + 3.0)
    report(book, 2, 5.0, echo=True)
    fault = book.came("ads/ctr", (1, 2), process(1, 2), NOW + 9.0)
    assert fault is not None
    assert (fault.rank, fault.epoch, fault.pid, fault.time) == (1, 1, 101, NOW + 3.0)
    assert ranks(book) == [(1, 1), (1, 2)]
    assert book.came("ads/ctr", (1, 1), Process(0, 3, "host", 200), NOW) is None  # the same process, anew
    report(book, 0, 100.0, epoch=3)
    assert book.came("ads/ctr", (1, 2), process(1, 3), NOW + 101.0) is None  # the launcher ended it because of that
    assert book.came("ads/ctr", (1, 9), Process(8, 1, "", 0), NOW) is None  # too old to say who it is
    assert book.came("ads/ctr", (1, 9), process(8, 2), NOW) is None


def test_what_is_kept_is_bounded() -> None:
    book = FaultBook()
    for rank in range(40):
        report(book, rank, rank / 100)
    assert ranks(book) == [(1, rank) for rank in range(book_of.MOST_OF_INCIDENT)]
    for epoch in range(2, 50):
        report(book, 0, epoch, epoch=epoch)
    assert len(book.listed()) == book_of.MOST_OF_JOB
    for job in range(2 * book_of.MOST):
        report(book, 0, job, job=f"ads/gateway-{job}")
    assert len(book.listed()) == book_of.MOST
    fault = book.report(
        "ads/ctr", (1, 1), Process(0, 99, "h" * 999, 1), NOW + 999, "x\x1b[2J\n" * 999, "é\x1b" * 99999, False
    )
    assert len(fault.message) == book_of.MESSAGE_CHARS
    assert len(fault.host) < 256
    assert len(fault.traceback.encode()) <= book_of.TRACEBACK_BYTES
    assert "\x1b" not in fault.message + fault.traceback


def test_workers_that_come_and_go_leave_nothing_behind() -> None:
    book = FaultBook()
    for worker_id in range(5_000):
        key = (worker_id % 7, worker_id)
        book.came("ads/ctr", key, process(0), NOW)
        book.heard(key, NOW + 3)
        if worker_id % 2:
            book.report("ads/ctr", key, process(0), NOW, "fault", "trace\n", False)
            book.heard(key, NOW + 6)  # a heartbeat that was under way
        book.left(key, 1)
    assert book.processes == {}
    assert book._due == {}
    assert len(book.listed()) <= book_of.MOST


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    text = bounded_traceback("Traceback\n" + "frame\n" * 9000 + "ValueError: last")
    assert text.startswith("Traceback\n")
    assert text.endswith("ValueError: last")
    assert "bytes are left out" in text
    assert bounded_traceback("short\n") == "short\n"


def test_a_restart_keeps_lines_and_who_has_not_left_but_no_tracebacks() -> None:
    book = FaultBook()
    book.came("ads/ctr", (1, 2), process(1), NOW)
    report(book, 0, 0.0)
    after = FaultBook.of_document(json.loads(json.dumps(book.to_document())))
    assert after.processes == book.processes == {(1, 2): process(1)}
    (fault,) = after.listed()
    assert (fault.rank, fault.message, fault.time) == (0, "fault 0", NOW)
    assert "trace\n" not in fault.traceback
    assert "coordinator that has ended" in fault.traceback
    for epoch in range(2, 50):
        for job in "abcd":
            report(book, 0, epoch, epoch=epoch, job=f"ads/{job}")
    assert len(json.dumps(book.to_document())) < 1000 * book_of.MOST_SAVED


def test_only_who_was_a_member_has_an_origin() -> None:
    jobs = Membership(10.0)
    ticket = jobs.register("ads", "ctr", 0, JobTerms(2, 0, "mean"))
    jobs.withdraw(ticket)
    assert jobs.origin(ticket.job_id, ticket.worker_id, 1) == ("ads/ctr", 0)
    for key in ((ticket.job_id, 9, 1), (7, ticket.worker_id, 1), (ticket.job_id, ticket.worker_id, 2)):
        with pytest.raises(Fenced, match="is not known as a member"):
            jobs.origin(*key)


def test_a_report_that_fails_leaves_the_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    report_fault(None, None, ValueError("of the loop"))  # type: ignore[arg-type]
    assert "was not reported" in caplog.text


def test_no_leader_is_waited_for_to_be_told_of_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(coordinators, "time", clock)
    nobody = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    who = WorkerIdentity(1, 1, 1, 10.0, 0, 1)
    with ControlClient(nobody) as control, pytest.raises(Unavailable):
        control.report_fault(who, message="m", traceback="", echo=False, deadline_sec=2.0)
    assert 0 < sum(slept) < 2.0


def test_echoes_are_what_the_end_of_another_process_causes() -> None:
    for error in (
        Fenced(""),
        ConnectionResetError(),
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:538] Connection closed"),
    ):
        assert is_echo(error), error
    for error in (ValueError(""), InvalidArgument(""), RuntimeError("CUDA out of memory")):
        assert not is_echo(error), error
