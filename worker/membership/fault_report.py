"""Reports to the coordinator why a worker ends, so that all errors of a job can be read in one place."""

from __future__ import annotations

import logging
import re
import traceback

from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, Fenced, Unavailable
from ...proto.security.security import process_security
from ...proto.worker_identity import WorkerIdentity

_log = logging.getLogger(__name__)

_DEADLINE_SEC = 2.0
_TRACEBACK_CHARS = 16 << 10
_CREDENTIALS = re.compile(r"(\w://)[^/\s@]+@")  # the user and password in a URL
# The value that follows such a word in a text, up to the next space, quote, comma or ampersand.
_SECRETS = re.compile(
    r"(?i)\b((?:[\w-]*(?:token|secret|password|passwd|api[_-]?key|access[_-]?key|signature)[\w-]*)[\"']?\s*[=:]\s*"
    r"|bearer\s+)([\"']?)[^\s\"',;&)]{4,}"
)


def report_fault(control: ControlClient, identity: WorkerIdentity, error: BaseException) -> None:
    """Reports an error to the coordinator, within two seconds. A failure of the report is only logged.

    The report has the error's type, message and traceback, with files, lines and their text, but no values of
    variables.

    Args:
        control: the client of the coordinator.
        identity: this worker's ids in the cluster.
        error: the error that ends this worker.
    """
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        words = (str(error).strip() or "without a message").splitlines()[0]
        control.report_fault(
            identity,
            message=without_credentials(f"{type(error).__name__}: {words}"),
            traceback=_shortened(without_credentials("".join(lines))),
            echo=is_echo(error),
            deadline_sec=_DEADLINE_SEC,
        )
    except Exception as failure:
        _log.warning("the error that ends this worker was not reported to the coordinator: %s", failure)


def is_echo(error: BaseException) -> bool:
    """Returns whether the error is of a kind that the end of another process causes."""
    if isinstance(error, (Fenced, Unavailable, DeadlineExceeded, ConnectionError)):
        return True
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return of_torch or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def without_credentials(text: str) -> str:
    """Returns the text with secrets replaced by ``***``.

    Secrets are users and passwords in URLs, this process's token, and values after words such as "password".
    """
    token = process_security().token
    if token:
        text = text.replace(token, "***")
    return _SECRETS.sub(r"\1\2***", _CREDENTIALS.sub(r"\1***@", text))


def _shortened(text: str) -> str:
    # Keeps the first and the last error of a chain; the coordinator cuts the text to the exact size.
    return text if len(text) <= 2 * _TRACEBACK_CHARS else text[:_TRACEBACK_CHARS] + "\n" + text[-_TRACEBACK_CHARS:]
