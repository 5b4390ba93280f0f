"""What is known of a commit that did not end well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...proto.errors import Fenced, NotFound

_DOUBT = "the step that ended so may have been applied: connect anew before rows are read"


@contextmanager
def fenced_in_doubt() -> Iterator[None]:
    """Says of a commit whose worker or job is over what is known of it: a copy of it, or another shard that has it,
    may have come before the refusal, and then the step is applied on all shards.
    """
    try:
        yield
    except (Fenced, NotFound) as error:
        raise type(error)(f"{error}; {_DOUBT}") from None
