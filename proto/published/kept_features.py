"""The features of a program that a run keeps for a later publication, as a folder beside the program's file."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from ..checkpoint.folder import Folder
from ..errors import FailedPrecondition, NotFound
from ..features.document import FEATURES, features_of, vocabulary_files
from ..features.vocabulary import MOST_BYTES

_PROGRAM = "program.xxh3"  # the digest of the program that the features belong to
_DIGEST_BYTES = 64


def keep_features(folder: Folder, files: Mapping[str, bytes], program: bytes) -> None:
    """Writes the features of a program, before the program itself is written.

    ``features.json`` is written last: a folder that has it is whole, and the digest shows whether the program exists.

    Args:
        folder: the folder, which is made where there are features.
        files: the files by name; none: the program has no features, and those of an earlier one are forgotten.
        program: the bytes of the program.
    """
    folder.delete(FEATURES)
    if not files:
        return
    folder.make()
    for name, data in files.items():
        if name != FEATURES:
            folder.put(name, data)
    folder.put(_PROGRAM, xxhash.xxh3_64_hexdigest(program).encode())
    folder.put(FEATURES, files[FEATURES])


def kept_features(folder: Folder, program: bytes) -> dict[str, bytes]:
    """Returns the files that :func:`keep_features` wrote, by name, ``features.json`` first.

    Args:
        folder: the folder.
        program: the bytes of the program's file.

    Raises:
        NotFound: the folder has no features.
        FailedPrecondition: the features are those of another program.
        DataLoss: a file is missing, or the files do not hold features.
    """
    names = set(folder.names())
    if not {FEATURES, _PROGRAM} <= names:
        raise NotFound(f"{folder.url}/{FEATURES}: the file does not exist; a run writes it beside its program")
    if folder.read_small(_PROGRAM, _DIGEST_BYTES).decode(errors="replace") != xxhash.xxh3_64_hexdigest(program):
        raise FailedPrecondition(f"{folder.url}: the features belong to another program; name both of one run")
    data = folder.read_small(FEATURES, MOST_BYTES)
    files = {FEATURES: data}
    for name in vocabulary_files(data, folder.url):
        if name in names:
            files[name] = folder.read_small(name, MOST_BYTES)
    features_of(files, folder.url)
    return files
