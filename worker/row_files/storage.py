"""Opens files by URL through fsspec; a new file gets its name only when it is complete."""

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
    """Returns the file format that the end of a URL names.

    Raises:
        InvalidArgument: the end names no format, or a format that is not among ``allowed``.
    """
    found = next((name for suffix, name in SUFFIXES.items() if url.endswith(suffix)), None)
    if found is None or found not in allowed:
        endings = ", ".join(suffix for suffix, name in SUFFIXES.items() if name in allowed)
        raise InvalidArgument(f"{url}: the end of the name is no format that can be used here; allowed: {endings}")
    return found


@contextmanager
def new_file(url: str) -> Iterator[IO[bytes]]:
    """Opens a new file to write from beginning to end; the file gets its name when the block ends without an error.

    An object store is written over the network meanwhile. A local file is flushed to its disk before it is renamed.

    Raises:
        InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted: the file cannot be written; the text has the
            URL. No part of it is left behind.
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
    """Returns the folder for temporary files as large as the file at ``url``: its own folder.

    Returns None, which means the system's temporary folder, for a remote file.
    """
    file_system, path = file_system_of(url)
    return str(Path(path).parent) if isinstance(file_system, LocalFileSystem) else None


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """Yields a local path of a file: the file itself, or a copy of a remote file that is removed after the block.

    Raises:
        InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted: the file cannot be read; the text has the URL.
    """
    file_system, path = file_system_of(url)
    with typed(url):
        if isinstance(file_system, LocalFileSystem):
            with open(path, "rb"):  # raises here for a folder or a file without permission
                pass
            yield Path(path)
            return
        with tempfile.TemporaryDirectory(prefix="sparserow-") as folder:
            copy = Path(folder) / Path(path).name
            file_system.get_file(path, str(copy))
            yield copy
