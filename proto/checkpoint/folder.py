"""A folder given by a URL, read and written with fsspec.

A file is there whole or not at all, and it is on the disk when ``write`` returns. An object store has whole objects
only. On a local disk a file is synced before it counts; a file that must appear in one instant gets its name by a
rename.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from ..errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SparserowError,
    not_allowed,
)
from ..extras import install_command
from ..names import check_file_name
from .local_file import Pace, create_file, hash_pieces, sync_folder, write_file

Piece: TypeAlias = "bytes | memoryview | np.ndarray[Any, Any]"

_TRIES = 4  # attempts of a remote call
_FIRST_PAUSE_SEC = 0.2
_LEAST_MAPPED_BYTES = 1 << 20  # the pages of a smaller file cost more than copying it
_STORES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "pyarrow")
_WITHOUT_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs"})
_FINAL = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotImplementedError,
    IsADirectoryError,
    NotADirectoryError,
)


@contextmanager
def typed(url: str) -> Iterator[None]:
    """Turns errors of storage into errors of the taxonomy that name the URL."""
    try:
        yield
    except (SparserowError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{url}: no such file or folder") from error
    except PermissionError as error:
        raise FailedPrecondition(f"{url}: {error.strerror or 'permission denied'}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceExhausted(f"{url}: {error.strerror}; make room and try again") from error
        raise FailedPrecondition(f"{url}: {error.strerror or error}") from error
    except Exception as error:  # packages for object stores raise error classes of their own
        if type(error).__module__.partition(".")[0] not in _STORES:
            raise
        raise FailedPrecondition(f"{url}: {error}") from error


def file_system_of(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path in it.

    Raises:
        InvalidArgument: the scheme is unknown, or its package is not installed.
    """
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        hint = f"; {install_command('s3')}" if url.startswith(("s3://", "s3a://")) else ""
        raise InvalidArgument(f"{url}: {error}{hint}") from error
    except ValueError as error:
        raise InvalidArgument(f"{url}: {error}") from error
    return file_system, str(path)


class Folder:
    """A folder that need not exist yet. It is as thread-safe as fsspec is.

    Every name of a file or folder in it is a plain file name; any other name raises InvalidArgument.

    Args:
        url: the URL or path of the folder.

    Attributes:
        url: the URL without its last slash.
        is_local: whether the folder is on a local file system.

    Raises:
        InvalidArgument: the URL is empty or no text, its scheme is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        if not isinstance(url, str) or not url:  # fsspec takes "" for the present folder
            raise not_allowed("folder", url, "a path or URL as text, such as models or s3://bucket/models")
        self.url = url.rstrip("/") or "/"
        self._file_system, path = file_system_of(url)
        self._path = path.rstrip("/")
        self.is_local = isinstance(self._file_system, LocalFileSystem)

    @property
    def path(self) -> str:
        """The path of the folder in its file system."""
        return self._path

    def path_of(self, name: str) -> str:
        """Returns the path of a file of the folder in its file system."""
        return self._inside(name)

    def __truediv__(self, name: str) -> Folder:
        path = self._inside(name)
        made = copy(self)  # shares the file system, because making one may take time
        made.url, made._path = f"{self.url.rstrip('/')}/{name}", path
        return made

    def _inside(self, name: str) -> str:
        """Returns the path of a file of this folder, after checking its name."""
        check_file_name(self.url, name)
        return f"{self._path}/{name}"

    def make(self) -> None:
        """Creates the folder with its parents; the call is harmless when the folder exists.

        Raises:
            FailedPrecondition, ResourceExhausted: the folder cannot be created.
        """
        named = self._file_system.protocol
        if _WITHOUT_FOLDERS.intersection([named] if isinstance(named, str) else named):
            return  # an object store has no folders, and a bucket is not created here
        with typed(self.url):
            self._file_system.makedirs(self._path, exist_ok=True)

    def names(self) -> list[str]:
        """Returns the sorted names of the files and folders in it; the list is empty when the folder does not exist."""
        with typed(self.url):
            self._file_system.invalidate_cache()
            try:
                found = self._again(lambda: self._file_system.ls(self._path, detail=False))
            except FileNotFoundError:
                return []
        return sorted(name for name in (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found) if name)

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each file in it, by name, from one listing; empty when the folder does not
        exist.
        """
        with typed(self.url):
            self._file_system.invalidate_cache()
            try:
                found = self._again(lambda: self._file_system.ls(self._path, detail=True))
            except FileNotFoundError:
                return {}
        sizes = {str(it["name"]).rsplit("/", 1)[-1]: it["size"] for it in found if it["type"] == "file"}
        # A listing over HTTP has no sizes.
        return {name: self.size(name) if size is None else int(size) for name, size in sizes.items()}

    def fingerprint(self) -> str:
        """Returns a text that differs after a file was added, removed or written anew, as far as a listing shows."""
        with typed(self.url):
            self._file_system.invalidate_cache()
            try:
                found = self._again(lambda: self._file_system.ls(self._path, detail=True))
            except FileNotFoundError:
                return ""
        return repr(sorted(sorted((fact, str(value)) for fact, value in it.items()) for it in found))

    def exists(self, name: str) -> bool:
        """Whether the folder has a file of that name."""
        path = self._inside(name)
        with typed(self.url):
            self._file_system.invalidate_cache()
            return bool(self._again(lambda: self._file_system.exists(path)))

    def size(self, name: str) -> int:
        """Returns the size of a file in bytes.

        Raises:
            NotFound: there is no such file.
        """
        path = self._inside(name)
        with typed(f"{self.url}/{name}"):
            return int(self._again(lambda: self._file_system.size(path)))

    def write(self, name: str, pieces: Sequence[Piece], pace: Pace | None = None) -> str:
        """Writes a file, which is on the disk when the call returns. What a failed call leaves is not usable.

        Args:
            name: the name of the file.
            pieces: the contents, written one after another.
            pace: slows the hashing and copying; None: nothing does.

        Returns:
            The XXH3-64 of the contents, in hexadecimal digits.

        Raises:
            FailedPrecondition, ResourceExhausted: the file cannot be written; the text names it.
        """
        path = self._inside(name)
        arrays = [np.frombuffer(bytes_of(piece), np.uint8) for piece in pieces]
        with typed(f"{self.url}/{name}"):
            if self.is_local:
                return write_file(path, arrays, pace)
            data = b"".join(piece.data for piece in arrays)
            self._again(lambda: self._file_system.pipe_file(path, data))
            return hash_pieces([np.frombuffer(data, np.uint8)], pace)

    def put(self, name: str, data: bytes) -> None:
        """Writes a small file that appears in one instant, after everything that was written before it.

        Raises:
            FailedPrecondition, ResourceExhausted: the file cannot be written; the text names it.
        """
        whole = self._inside(name)
        if not self.is_local:
            self.write(name, [data])
            return
        self.write(f"{name}.partial", [data])
        with typed(f"{self.url}/{name}"):
            os.replace(f"{whole}.partial", whole)
            for path in (self._path, str(Path(self._path).parent)):
                sync_folder(path)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a small file in one instant, unless there is a file of that name.

        Args:
            name: the name of the file.
            data: the contents, which must differ from every other writer's, because they identify a write whose answer
                was lost.

        Returns:
            Whether this call wrote the file.

        Raises:
            FailedPrecondition, ResourceExhausted: the file cannot be written; the text names it. There is none then.
        """
        path = self._inside(name)
        with typed(f"{self.url}/{name}"):
            try:
                if not self.is_local:
                    self._again(lambda: self._file_system.pipe_file(path, data, mode="create"))
                    return True
                self._file_system.makedirs(self._path, exist_ok=True)
                create_file(path, data)
                return True
            except FileExistsError:
                if self.is_local:
                    return False
            try:
                return bytes(self._again(lambda: self._file_system.cat_file(path))) == data
            except FileNotFoundError:  # the writer of the file has removed it meanwhile
                return False

    def probe(self) -> None:
        """Writes a file and removes it, to find out early whether the folder can be written.

        Raises:
            FailedPrecondition, ResourceExhausted: it cannot.
        """
        name = f".probe-{secrets.token_hex(8)}"
        self.put(name, b"")
        self.delete(name)

    def delete(self, name: str) -> None:
        """Removes a file; the call is harmless when the file is gone.

        Raises:
            FailedPrecondition: the file cannot be removed.
        """
        path = self._inside(name)
        with typed(f"{self.url}/{name}"), suppress(FileNotFoundError):
            self._again(partial(self._file_system.rm, path, recursive=True))

    def read(self, name: str) -> memoryview:
        """Returns the bytes of a file. A local file of 1 MiB or more is mapped, so that only the parts that are used
        are read.

        Raises:
            NotFound, FailedPrecondition: the file is missing or cannot be read; the text names it.
        """
        path = self._inside(name)
        with typed(f"{self.url}/{name}"):
            if not self.is_local:
                return memoryview(self._again(lambda: self._file_system.cat_file(path)))
            if os.path.getsize(path) < _LEAST_MAPPED_BYTES:
                return memoryview(Path(path).read_bytes())
            return memoryview(np.memmap(path, np.uint8, mode="r"))  # type: ignore[arg-type]

    def read_small(self, name: str, most_bytes: int) -> bytes:
        """Returns the bytes of a small file; it asks for no more than ``most_bytes`` + 1.

        Raises:
            NotFound, FailedPrecondition: the file is missing or cannot be read; the text names it.
            DataLoss: the file has more than ``most_bytes``.
        """
        path = self._inside(name)
        with typed(f"{self.url}/{name}"):
            if self.is_local:
                with open(path, "rb") as file:
                    data = file.read(most_bytes + 1)
            else:
                data = bytes(self._again(lambda: self._cat_some(path, most_bytes + 1)))
        if len(data) > most_bytes:
            raise DataLoss(f"{self.url}/{name}: is damaged: it has too many bytes; allowed: at most {most_bytes}")
        return data

    def _cat_some(self, path: str, most_bytes: int) -> bytes:
        try:
            return bytes(self._file_system.cat_file(path, start=0, end=most_bytes))
        except _FINAL:
            raise
        except OSError:  # object stores refuse a range of an empty file
            if self._file_system.size(path) != 0:
                raise
            return b""

    def read_ahead(self, name: str) -> None:
        """Asks the system to read a local file in the background, because it is about to be read whole; errors are
        ignored.
        """
        if not self.is_local:
            return
        with suppress(OSError):
            descriptor = os.open(self._inside(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def remove(self) -> None:
        """Removes the folder with everything in it, manifest first; the call is harmless when the folder is gone.

        Raises:
            FailedPrecondition: the folder cannot be removed.
        """
        with typed(self.url):
            for path in (f"{self._path}/manifest.json", self._path):
                with suppress(FileNotFoundError):
                    self._again(partial(self._file_system.rm, path, recursive=path == self._path))

    def abort_uploads(self, begins: str) -> None:
        """Ends the unfinished uploads that killed writers left in an object store: they are invisible but take space.

        Args:
            begins: the prefix of the names to look at, of files directly in this folder or of folders in it.

        Raises:
            FailedPrecondition: the store refuses.
        """
        listed = getattr(self._file_system, "list_multipart_uploads", None)
        if listed is None:
            return
        bucket, _, inside = self._path.partition("/")
        prefix = f"{inside}/{begins}" if inside else begins
        with typed(self.url):
            for upload in self._again(lambda: listed(bucket)):
                if upload["Key"].startswith(prefix):
                    self._again(partial(self._file_system.abort_mpu, bucket, upload["Key"], upload["UploadId"]))

    def _again(self, call: Any) -> Any:
        """Makes a call and repeats it a few times when it is remote, because object stores fail
        a request now and then.
        """
        pause = _FIRST_PAUSE_SEC
        for left in range(_TRIES - 1, -1, -1):
            try:
                return call()
            except _FINAL:
                raise
            except OSError:
                if self.is_local or not left:
                    raise
                time.sleep(pause)
                pause *= 2
        raise AssertionError("unreachable")


def bytes_of(piece: Piece) -> memoryview:
    """Returns the bytes of a piece, which are copied only where an array is not contiguous."""
    if isinstance(piece, np.ndarray):
        return memoryview(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return memoryview(piece).cast("B")
