"""Decides in which folders a coordinator saves and restores, from the text of a URL, before anything opens it."""

from __future__ import annotations

from collections.abc import Sequence

from ....proto.checkpoint.urls import PLAIN_SCHEMES, check_url, is_inside, scheme_of
from ....proto.errors import FailedPrecondition, not_allowed
from ....proto.security.security import process_security

_KEY = "checkpoint_roots"


class CheckpointRoots:
    """The folders that the option ``checkpoint_roots`` names.

    Without such folders, a coordinator on loopback that asks for no tokens accepts local paths and plain schemes. Any
    other coordinator without them accepts no URL.

    Args:
        roots: paths or URLs; everything below them is allowed.
        is_loopback: whether only processes of this machine can reach the coordinator.

    Raises:
        InvalidArgument: a root is not a URL that may be used.
    """

    def __init__(self, roots: Sequence[str] = (), *, is_loopback: bool = True) -> None:
        self.roots = tuple(check_url(_KEY, root) for root in roots)
        self._is_loopback = is_loopback

    def check(self, url: str) -> str:
        """Returns a URL that may be opened, in the form in which URLs are compared.

        Raises:
            InvalidArgument: the URL is refused everywhere (``proto/checkpoint/urls.py``).
            FailedPrecondition: the URL is below no root, or there is no root; the text names the option to set.
        """
        checked = check_url("url", url)
        if any(is_inside(checked, root) for root in self.roots):
            return checked
        if self.roots:
            raise FailedPrecondition(f"url: {checked!r} is below no folder of {_KEY}; allowed: {', '.join(self.roots)}")
        if process_security().tokens is not None or not self._is_loopback:
            reason = "asks for tokens" if process_security().tokens is not None else "is reached by other machines"
            raise FailedPrecondition(
                f"url: {checked!r} is not allowed: this coordinator {reason} and has no {_KEY}; start it with "
                "--checkpoint-root URL"
            )
        if scheme_of(checked) not in PLAIN_SCHEMES:
            raise not_allowed(
                "url",
                checked,
                f"an absolute path, or one of {', '.join(PLAIN_SCHEMES)}; others where {_KEY} names them",
            )
        return checked
