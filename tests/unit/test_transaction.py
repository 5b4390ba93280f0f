"""What a step that ends in an error says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparserow.proto.errors import FailedPrecondition, Fenced, InvalidArgument, OutsideQuorum, SparserowError
from sparserow.worker.session.background_push import BackgroundPush
from sparserow.worker.session.quorum import check_quorum, check_step
from sparserow.worker.session.session_parts import Placement
from sparserow.worker.session.tracing import NoTrace
from sparserow.worker.session.transaction import end_step

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
    return end_step(native, None, dense=None, scale=None, allow_empty=True, is_distributed=False, on_nonfinite="raise",
                    pushes=pushes, trace=NoTrace())  # fmt: skip


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
