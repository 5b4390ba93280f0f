"""The errors of collective calls: what torch raises when a rank is gone or late becomes an error of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...proto.errors import DeadlineExceeded, Unavailable

Result = TypeVar("Result")


def waited(call: Callable[[], Result], *, what: str, ranks: str, then: str) -> Result:
    """Makes a collective call of torch and returns its result.

    Args:
        call: the call.
        what: what is called, which begins the text of an error.
        ranks: the ranks that take part, such as "the job".
        then: what is possible after an error, which ends its text.

    Raises:
        DeadlineExceeded: a rank did not take part within the timeout of the process group.
        Unavailable: a rank is gone.
    """
    try:
        return call()
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        is_late = "imed out" in said or "imeout" in said
        text = f"a rank of {ranks} did not take part in time" if is_late else f"a rank of {ranks} is gone"
        kind = DeadlineExceeded if is_late else Unavailable
        raise kind(f"{what}: {text} ({said}); {then}") from error
