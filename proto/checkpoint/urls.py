"""URLs of folders that a peer names: what is refused as a string, before a file system is made of it.

A string alone is judged here. Symbolic links within a folder lead where they say.
"""

from __future__ import annotations

import os
import posixpath
import re

from ..errors import InvalidArgument, not_allowed

MOST_CHARACTERS = 4096
# A server opens these where no roots are named; other schemes only where a root has them.
PLAIN_SCHEMES = ("file", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hdfs", "memory")
URL_FORM = "an absolute path, or SCHEME://PLACE/FOLDER such as s3://bucket/folder"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_PATTERNS = frozenset("*?[")  # a store would look for files that match
# They lead to other hosts, to other file systems, or to what the URL itself holds.
_REFUSED_SCHEMES = frozenset(
    {
        *("http", "https", "ftp", "ftps", "sftp", "ssh", "smb", "webdav", "webdavs", "github", "git", "gist", "hf"),
        *("data", "reference", "zip", "tar", "libarchive", "dir", "generic", "cached", "blockcache", "filecache"),
        *("simplecache", "async_wrapper", "jupyter", "jlab", "dask", "asynclocal", "arrow_hdfs", "webhdfs", "local"),
    }
)


def check_url(what: str, url: str) -> str:
    """The URL as it is compared: a local one as a normal path, another one without its last slashes.

    Args:
        what: begins the message of an error.
        url: of a folder.

    Raises:
        InvalidArgument: it is empty, longer than 4,096 characters, a chain of file systems, of a scheme that leads
            elsewhere, or it has control characters, patterns, or segments ``..``.
    """
    if not url or len(url) > MOST_CHARACTERS:
        raise InvalidArgument(f"{what}: has {len(url)} characters; allowed: 1 to {MOST_CHARACTERS}")
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
    """A URL that means the same to processes with other working folders."""
    return url if "://" in url else os.path.abspath(url)


def scheme_of(url: str) -> str:
    """The scheme of a checked URL; ``file`` of a path."""
    return "file" if url.startswith("/") else url.partition("://")[0]


def is_inside(url: str, root: str) -> bool:
    """Whether a checked URL is a checked root, or a folder below it."""
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
