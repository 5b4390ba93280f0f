"""The end of a step: the order of its participants, and what a step that ends in an error says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from rooms import ROOT
from sparserow.proto.errors import FailedPrecondition, Fenced, InvalidArgument, OutsideQuorum, SparserowError
from sparserow.worker.session.background_push import BackgroundPush
from sparserow.worker.session.participant import SEALED, Participant, Seal, Step
from sparserow.worker.session.quorum import check_quorum, check_step
from sparserow.worker.session.server_rows import ServerRows
from sparserow.worker.session.session_parts import Placement
from sparserow.worker.session.step import NonFiniteGradient, discard_step, end_step
from sparserow.worker.session.tracing import NoTrace

DOUBT = "may have been applied"


class Native:
    """A session on two shards, which is fenced in a phase of its commit."""

    step, staged_calls, shard_count = 3, 1, 2

    def __init__(self, phase: str, error: type[SparserowError] = Fenced) -> None:
        self.phase, self.error, self.is_prepared = phase, error, False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            if name == self.phase:
                raise self.error("worker 1 left job 'ads'; connect anew")
            self.is_prepared |= name == "prepare"
            return (0, 0, "", 0)

        return call


def step(native: Any, pushes: BackgroundPush | None = None) -> bool:
    return end_step([ServerRows(native, pushes)], Step(native.step, NoTrace(), allow_empty=True))


def test_one_that_is_fenced_before_it_is_decided_is_not_applied() -> None:
    native = Native("prepare")
    with pytest.raises(Fenced) as caught:
        step(native)
    assert DOUBT not in str(caught.value)
    assert "abort" in native.calls


@pytest.mark.parametrize("in_background", [False, True])
def test_one_that_is_fenced_when_it_is_decided_may_be(in_background: bool) -> None:
    native = Native("finish_commit" if in_background else "commit_prepared")
    pushes = BackgroundPush(native) if in_background else None  # type: ignore[arg-type]
    if pushes is not None:
        step(native, pushes)  # it counts as taken
    with pytest.raises(Fenced, match=f"left job 'ads'; connect anew; the step that ended so {DOUBT}"):
        step(native) if pushes is None else pushes.close()


@pytest.mark.parametrize("phase", ["prepare", "commit_prepared"])
def test_one_outside_of_the_quorum_is_not_taken_and_its_session_goes_on(phase: str) -> None:
    native = Native(phase, OutsideQuorum)
    assert step(native) is False
    assert "abort" not in native.calls, "the native session has aborted it already"
    assert native.calls[-1] == "reopen"


def test_a_step_that_is_discarded_after_one_outside_of_the_quorum_is_aborted() -> None:
    native = Native("prepare", OutsideQuorum)
    rows = ServerRows(native, None)
    assert end_step([rows], Step(native.step, NoTrace(), allow_empty=True)) is False
    assert "abort" not in native.calls
    discard_step([rows], Step(native.step, NoTrace()))
    assert "abort" in native.calls


class Tables:
    """Tables on devices whose rows cannot be summed."""

    names = ("a",)

    def seal(self, *_: float) -> None:
        raise torch.OutOfMemoryError("device")

    def forget(self) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def test_an_error_while_one_seals_leaves_no_gradient_of_another() -> None:
    with sr.InProcessCluster().connect("sealed") as session:
        model = session.distribute(
            nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 1)), optimizer=sr.optim.SGD(lr=1.0), min_rows=1
        )
        dense = torch.optim.SGD(model.parameters(), lr=1.0)
        before = session.table("0").pull([1])
        model(torch.tensor([1])).sum().backward()
        session.core.device_tables = Tables()
        with pytest.raises(torch.OutOfMemoryError):
            session.step(dense)
        session.core.device_tables = None
        assert (session.core.native.staged_calls, model[1].weight.grad) == (0, None)
        model(torch.tensor([2])).sum().backward()
        assert session.step(dense)
        assert np.array_equal(session.table("0").pull([1]), before), "the gradients of the step that failed are gone"


def test_a_step_before_backward_changes_nothing() -> None:
    with sr.InProcessCluster().connect("early") as session:
        model = session.distribute(
            nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 1)), optimizer=sr.optim.SGD(lr=1.0), min_rows=1
        )
        dense = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = model(torch.tensor([1])).sum()
        model[1].weight.grad = torch.ones(1, 2)
        with pytest.raises(FailedPrecondition, match="no backward reached"):
            session.step(dense)
        assert model[1].weight.grad is not None, "dense gradients wait for the step"
        before = session.table("0").pull([1])
        loss.backward()
        assert session.step(dense)
        assert not np.array_equal(session.table("0").pull([1]), before)


def test_a_quorum_is_refused_beside_what_waits_for_all_workers() -> None:
    placement = Placement("ads", world_size=3, quorum=2)
    check_quorum(placement, is_mesh=False)
    check_step(placement, None)
    for changed, words in (
        (replace(placement, quorum=4), r"connect\.quorum: 4 is not allowed; allowed: 1 to 3"),
        (replace(placement, quorum=0), r"connect\.quorum: 0 is not allowed"),
        (replace(placement, staleness=1), r"connect\.quorum: 2 is not allowed; allowed: None unless staleness is 0"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            check_quorum(changed, is_mesh=False)
    with pytest.raises(InvalidArgument, match=r"connect\.quorum: 2 is not allowed; allowed: None beside mesh"):
        check_quorum(placement, is_mesh=True)
    with pytest.raises(InvalidArgument, match=r"session\.step: dense is not possible with a quorum"):
        check_step(placement, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


def test_a_quorum_is_refused_within_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    check_step(Placement("ads", world_size=1, quorum=1), None)
    with pytest.raises(FailedPrecondition, match=r"a quorum is not possible within a torch\.distributed"):
        check_step(Placement("ads", world_size=3, quorum=2), None)


class Part:
    """A participant that writes down its calls; in one phase it raises, or is not finite, or refuses."""

    def __init__(self, name: str, calls: list[str], phase: str = "", ends: Exception | Seal | None = None) -> None:
        self.name, self.calls, self.phase, self.ends = name, calls, phase, ends

    def _call(self, phase: str, note: object = "") -> None:
        self.calls.append(f"{phase} {self.name}{note}")
        if phase == self.phase and isinstance(self.ends, Exception):
            raise self.ends

    def seal(self, _: Step) -> Seal:
        self._call("seal")
        return self.ends if self.phase == "seal" and isinstance(self.ends, Seal) else SEALED

    def prepare(self, _: Step) -> None:
        self._call("prepare")

    def commit(self, _: Step) -> None:
        self._call("commit")

    def abort(self, _: Step, *, is_skipped: bool) -> None:
        self._call("abort", " skipped" if is_skipped else "")

    def forget(self, _: Step, *, has_failed: bool) -> None:
        self._call("forget", " failed" if has_failed else "")

    def stats(self) -> dict[str, int]:
        return {}


NAMES = ("rows", "ranks", "dense")
SEALS, PREPARES = (["seal dense", "seal ranks", "seal rows"], ["prepare dense", "prepare ranks", "prepare rows"])
COMMITS = ["commit rows", "commit ranks", "commit dense"]


def aborts(note: str = "") -> list[str]:
    return [f"abort {name}{note}" for name in reversed(NAMES)]


def forgets(note: str = "") -> list[str]:
    return [f"forget {name}{note}" for name in NAMES]


def ended(who: str = "", phase: str = "", ends: Exception | Seal | None = None, **terms: Any) -> tuple[Any, list[str]]:
    """What a step of three participants returns or raises, and their calls; one of them ends it in a phase."""
    calls: list[str] = []
    parts: list[Participant] = [Part(name, calls, *((phase, ends) if name == who else ())) for name in NAMES]
    try:
        return end_step(parts, Step(3, NoTrace(), **terms)), calls
    except Exception as error:
        return error, calls


def test_participants_are_sealed_and_prepared_backwards_and_committed_in_order() -> None:
    assert ended() == (True, [*SEALS, *PREPARES, *COMMITS, *forgets()])


@pytest.mark.parametrize("who", NAMES)
def test_one_that_refuses_while_it_seals_has_all_of_them_dropped(who: str) -> None:
    refusal = FailedPrecondition("no")
    result, calls = ended(who, "seal", Seal(refusal=refusal))
    assert result is refusal
    assert calls == [*SEALS, *aborts(), *forgets(" failed")]


@pytest.mark.parametrize("who", NAMES)
def test_one_that_is_not_finite_has_the_step_refused_or_skipped(who: str) -> None:
    bad = Seal(f"a gradient of {who} is not finite")
    result, calls = ended(who, "seal", bad)
    assert isinstance(result, NonFiniteGradient)
    assert str(result).startswith(f"a gradient of {who} is not finite; the step was refused and nothing was applied")
    assert calls == [*SEALS, *aborts(" skipped"), *forgets(" failed")]
    assert ended(who, "seal", bad, raises_nonfinite=False) == (
        False,
        [*SEALS, *aborts(" skipped"), *forgets()],
    )


@pytest.mark.parametrize("who", NAMES)
def test_one_that_cannot_prepare_has_all_of_them_dropped(who: str) -> None:
    error = InvalidArgument("no memory")
    result, calls = ended(who, "prepare", error)
    assert result is error
    prepared = PREPARES[: PREPARES.index(f"prepare {who}") + 1]
    assert calls == [*SEALS, *prepared, *aborts(), *forgets(" failed")]
    assert ended(who, "prepare", OutsideQuorum("late")) == (
        False,
        [*SEALS, *prepared, *aborts(" skipped"), *forgets()],
    )


def test_a_commit_outside_of_the_quorum_changes_nothing_else() -> None:
    assert ended("rows", "commit", OutsideQuorum("late")) == (
        False,
        [*SEALS, *PREPARES, "commit rows", *aborts(" skipped"), *forgets()],
    )


@pytest.mark.parametrize("phase", ["seal", "commit"])
@pytest.mark.parametrize("who", NAMES)
def test_an_error_in_a_phase_leaves_no_gradient(who: str, phase: str) -> None:
    """What was committed before stays so: rows that are committed cannot be taken back."""
    error = RuntimeError("full")
    result, calls = ended(who, phase, error)
    assert result is error
    order = SEALS if phase == "seal" else COMMITS
    begun = order[: order.index(f"{phase} {who}") + 1]
    assert calls == [*([] if phase == "seal" else [*SEALS, *PREPARES]), *begun, *forgets(" failed")]


@pytest.mark.parametrize("who", NAMES)
def test_an_error_while_one_forgets_or_aborts_stops_no_other(who: str) -> None:
    error = RuntimeError("gone")
    result, calls = ended(who, "forget", error)
    assert result is error
    assert calls == [*SEALS, *PREPARES, *COMMITS, *forgets()]
    calls = []
    parts: list[Participant] = [Part(name, calls, *(("abort", error) if name == who else ())) for name in NAMES]
    with pytest.raises(RuntimeError, match="gone"):
        discard_step(parts, Step(3, NoTrace()))
    assert calls == [*aborts(), *forgets(" failed")]


def test_a_step_that_is_discarded_is_aborted_and_forgotten() -> None:
    calls: list[str] = []
    discard_step([Part(name, calls) for name in NAMES], Step(3, NoTrace()))
    assert calls == [*aborts(), *forgets()]


def test_the_end_of_a_step_names_no_participant() -> None:
    session = ROOT / "worker" / "session"
    text = (session / "step.py").read_text()
    names = ("server_rows", "rank_rows", "dense_on_servers", "dense_optimizer", "group_vote")
    assert all((session / f"{name}.py").is_file() for name in names)
    assert [word for word in (*names, "native", "scale", "dense", "sparse", "tables") if word in text] == []
