"""Refuses URLs of folders that a peer may not name, before a file system is made of them.

The check looks at the text alone; symbolic links within a folder are not resolved.
"""

from __future__ import annotations

import os
import posixpath
import re

from ..errors import InvalidArgument, not_allowed
from .entries import number_of

MOST_CHARACTERS = 4096
# A server opens these schemes where no roots are configured. It opens any other scheme only below a root of that
# scheme.
PLAIN_SCHEMES = ("file", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hdfs", "memory")
URL_FORM = "an absolute path, or SCHEME://PLACE/FOLDER such as s3://bucket/folder"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_PATTERNS = frozenset("*?[")  # a store would search for files that match such a pattern
# URLs of these schemes lead to other hosts, to other file systems, or to data in the URL itself.
_REFUSED_SCHEMES = frozenset(
    {
        *("http", "https", "ftp", "ftps", "sftp", "ssh", "smb", "webdav", "webdavs", "github", "git", "gist", "hf"),
        *("data", "reference", "zip", "tar", "libarchive", "dir", "generic", "cached", "blockcache", "filecache"),
        *("simplecache", "async_wrapper", "jupyter", "jlab", "dask", "asynclocal", "arrow_hdfs", "webhdfs", "local"),
    }
)


def check_url(what: str, url: str) -> str:
    """Returns the URL in the form that is compared: a local path is normalized, and other URLs lose their last slashes.

    Args:
        what: the name of the field, which begins an error message.
        url: the URL of a folder.

    Raises:
        InvalidArgument: the URL is empty or longer than 4,096 characters, or chains file systems; its scheme is
            refused; or it has control characters, patterns, or a segment ``..``.
    """
    if not url or len(url) > MOST_CHARACTERS:
        raise InvalidArgument(f"{what}: the URL has {len(url)} characters; allowed: 1 to {MOST_CHARACTERS}")
    if not url.isprintable():
        raise _refused(what, url, "no control characters")
    if "::" in url:
        raise _refused(what, url, "no chain of file systems by '::'")
    scheme, path = _parts_of(what, url)
    if scheme in _REFUSED_SCHEMES:
        raise _refused(what, url, f"a scheme such as {', '.join(PLAIN_SCHEMES)}")
    if "://" in path:
        raise _refused(what, url, "one '://'")
    if ".." in re.split(r"[/\\]", path):
        raise _refused(what, url, "no segment '..'")
    if scheme == "file":
        return "/" + posixpath.normpath(path).lstrip("/")
    if _PATTERNS.intersection(path):
        raise _refused(what, url, "none of * ? [")
    place = path.rstrip("/")
    if not place.lstrip("/"):
        raise _refused(what, url, URL_FORM)
    return f"{scheme}://{place}"


def absolute(url: str) -> str:
    """Returns a URL that means the same to processes with other working folders."""
    return url if "://" in url else os.path.abspath(url)


def parent_of(path: str) -> tuple[str, str]:
    """Returns the folder of a file, and the name of the file in it.

    Args:
        path: the path or URL of the file; a path without a folder is one in the present folder.
    """
    folder, slash, name = path.rpartition("/")
    if slash and (not folder or folder.endswith((":/", "://"))):  # the root of a file system keeps its slash
        folder += slash
    return folder or ".", name


def scheme_of(url: str) -> str:
    """Returns the scheme of a checked URL, which is ``file`` for a path."""
    return "file" if url.startswith("/") else url.partition("://")[0]


def is_inside(url: str, root: str) -> bool:
    """Whether a checked URL is the checked root, or a folder below it."""
    return url == root or url.startswith(root.rstrip("/") + "/")


def _parts_of(what: str, url: str) -> tuple[str, str]:
    if url.startswith("/"):
        return "file", url
    match = _SCHEME.fullmatch(url)
    if match is None or (match[1] == "file" and not match[2].startswith("/")):
        raise _refused(what, url, URL_FORM)
    return match[1], match[2]


def _refused(what: str, url: str, allowed: str) -> InvalidArgument:
    return not_allowed(what, url[:200], allowed)


def folder_and_name(place: str) -> tuple[str, str]:
    """Returns the folder of checkpoints, made absolute, and the name of one of them; "" where the place names none.

    Args:
        place: the path or URL of a folder of checkpoints, or of a checkpoint in it.
    """
    url = absolute(place)
    folder, _, name = url.rstrip("/").rpartition("/")
    return (folder, name) if number_of(name) is not None else (url, "")
