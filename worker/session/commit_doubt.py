"""Adds to the error of a refused commit that the commit may have been applied all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...proto.errors import Fenced, NotFound

_DOUBT = "the step that ended so may have been applied: connect anew before rows are read"


@contextmanager
def fenced_in_doubt() -> Iterator[None]:
    """Extends Fenced and NotFound errors of the body, which sends a commit, by the doubt about its outcome.

    A shard refuses a commit whose worker or job has ended. An earlier copy of the commit may have arrived before the
    refusal, or another shard may have the commit; then the step is applied on all shards.
    """
    try:
        yield
    except (Fenced, NotFound) as error:
        raise type(error)(f"{error}; {_DOUBT}") from None
