"""Uses of a distributed layer that torch's own layers allow, and that are refused by name with what works instead."""

from __future__ import annotations

import torch

from ...proto.errors import FailedPrecondition, typed_error

_INSTEAD = "allowed: torch.compile, torch.export of the model in eval mode, and calls of the model itself"


def check_transforms(binding: str) -> None:
    """Refuses a lookup within a transform of torch.func, in which it would have no gradient, or one of a batch.

    Raises:
        FailedPrecondition: there is one.
    """
    if torch._C._are_functorch_transforms_active():
        raise FailedPrecondition(
            f"table {binding!r}: a transform of torch.func (vmap, grad, jvp) is not possible over lookups; {_INSTEAD}"
        )


def error_of_lookup(binding: str, error: Exception) -> Exception:
    """Returns what a lookup that failed says; torch's own words within a trace name nothing that a user knows."""
    if "as a constant" not in str(error):
        return typed_error(error)
    return FailedPrecondition(f"table {binding!r}: torch.jit.trace is not possible over lookups; {_INSTEAD}")


def error_of_script(binding: str) -> FailedPrecondition:
    """Returns the error for ``torch.jit.script``."""
    return FailedPrecondition(f"table {binding!r}: torch.jit.script is not possible over lookups; {_INSTEAD}")


def error_of_reset(binding: str) -> FailedPrecondition:
    """Returns the error for ``reset_parameters``."""
    return FailedPrecondition(
        f"table {binding!r}: reset_parameters draws no rows, as they are on the servers; initialise the layer before "
        "distribute, which takes its rows over, or use session.table(name).assign(keys, rows)"
    )
