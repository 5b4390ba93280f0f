"""What a step that ends in an error says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from sparserow.proto.errors import Fenced
from sparserow.worker.session.background_push import BackgroundPush
from sparserow.worker.session.tracing import NoTrace
from sparserow.worker.session.transaction import end_step

DOUBT = "may have been applied"


class Native:
    """A session on two shards, which is fenced in a phase of its commit."""

    step, staged_calls, shard_count = 3, 1, 2

    def __init__(self, phase: str) -> None:
        self.phase, self.is_prepared = phase, False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            if name == self.phase:
                raise Fenced("worker 1 left job 'ads'; connect anew")
            self.is_prepared |= name == "prepare"
            return (0, 0, "", 0)

        return call


def step(native: Any, pushes: BackgroundPush | None = None) -> None:
    end_step(native, None, dense=None, scale=None, allow_empty=True, is_distributed=False, on_nonfinite="raise",
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
