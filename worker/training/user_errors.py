"""Reports errors of the user's own code as theirs: the exception, and where in their code it was raised."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from types import FrameType

import torch

from ...proto.errors import InvalidArgument, SparserowError
from ..membership.fault_report import is_echo

_OURS = __name__.partition(".")[0]
_MODELS = f"{_OURS}.worker.models"  # layers that a model of the user's own may call
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# A device may fail in any line, so a new start may succeed.
_OF_DEVICES = (torch.OutOfMemoryError, torch.AcceleratorError)


@contextlib.contextmanager
def named_as_theirs(class_: str) -> Iterator[None]:
    """Turns an error that the code of a model's class raises within the block into one that names its place.

    Errors of devices, of peers and of this package stay as they are.

    Args:
        class_: the option ``model.class`` of the job.

    Raises:
        InvalidArgument: the class raised an error; the text has its type, its text, its file and its line.
    """
    try:
        yield
    except Exception as error:
        place = place_of(error, class_)
        if place is None:
            raise
        raise InvalidArgument(f"model.class: {class_} raised {line_of_error(error, place)}") from error


def line_of_error(error: Exception, place: str | None = None) -> str:
    """Returns the type and the text of an error, and its place where that is known, in one line."""
    words = " ".join(str(error).split())
    what = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return what if place is None else f"{what}, in {place}"


def is_of_others(error: Exception) -> bool:
    """Returns whether an error is one of devices, of peers or of this package."""
    return isinstance(error, (SparserowError, *_OF_DEVICES)) or is_echo(error)


def place_of(error: Exception, name: str) -> str | None:
    """Returns the file, line and function of the user's code that raised an error; None where another's did.

    Args:
        error: the error, with its traceback.
        name: the class or the function that was called, as MODULE:NAME; a name without a module is of this package.
    """
    if is_of_others(error):
        return None
    module = name.rpartition(":")[0]
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_of_user(frame, module):
            found = f"{frame.f_code.co_filename}, line {line}, {frame.f_code.co_name}"
        elif _name_of(frame).startswith(f"{_OURS}.") and not _name_of(frame).startswith(_MODELS):
            found = None
    return found


def _is_of_user(frame: FrameType, module: str) -> bool:
    """Returns whether a frame runs code of the package of a module, or code that no library has."""
    root = module.partition(".")[0]
    name = _name_of(frame).partition(".")[0]
    if name == _OURS:
        return False
    return (bool(root) and name == root) or not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


def _name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
