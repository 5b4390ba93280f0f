"""Files by URL through fsspec: a new file is seen under its name when it is whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from fsspec.implementations.local import LocalFileSystem

from ...proto.checkpoint.folder import file_system_of, typed
from ...proto.errors import InvalidArgument

FileFormat = Literal["parquet", "safetensors", "npz", "torch"]
SUFFIXES: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
}


def format_of(url: str, allowed: tuple[FileFormat, ...]) -> FileFormat:
    """The format that the end of a URL names.

    Raises:
        InvalidArgument: it names none, or one that is not allowed here.
    """
    found = next((name for suffix, name in SUFFIXES.items() if url.endswith(suffix)), None)
    if found is None or found not in allowed:
        endings = ", ".join(suffix for suffix, name in SUFFIXES.items() if name in allowed)
        raise InvalidArgument(f"{url}: the end of its name says no format that can be used here; allowed: {endings}")
    return found


@contextmanager
def new_file(url: str) -> Iterator[IO[bytes]]:
    """A file to write from its beginning to its end; takes its name when the block ends without an error.

    An object store writes over the network as it goes; a local file is flushed to its disk first.

    Raises:
        InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted: naming the URL; nothing is left behind.
    """
    file_system, path = file_system_of(url)
    partial = f"{path}.partial"
    is_local = isinstance(file_system, LocalFileSystem)
    with typed(url):
        try:
            with open(partial, "wb") if is_local else file_system.open(partial, "wb") as file:
                yield file
                if is_local:
                    file.flush()
                    os.fsync(file.fileno())
            if is_local:
                os.replace(partial, path)
            else:
                file_system.mv(partial, path)
        except BaseException:
            with suppress(Exception):
                file_system.rm(partial)
            raise


def scratch_folder(url: str) -> str | None:
    """Where temporary files of the size of this one belong: beside it; None (the system's place) for a remote one."""
    file_system, path = file_system_of(url)
    return str(Path(path).parent) if isinstance(file_system, LocalFileSystem) else None


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """A path at which a file can be mapped: the file itself, or a copy of a remote one, kept for the block.

    Raises:
        InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted: naming the URL.
    """
    file_system, path = file_system_of(url)
    with typed(url):
        if isinstance(file_system, LocalFileSystem):
            with open(path, "rb"):  # a folder, or one without permission, is said here
                pass
            yield Path(path)
            return
        with tempfile.TemporaryDirectory(prefix="sparserow-") as folder:
            copy = Path(folder) / Path(path).name
            file_system.get_file(path, str(copy))
            yield copy
