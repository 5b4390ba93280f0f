"""The files of a dense side that ranks had in parts: a list in the state of worker 0, which the manifest covers.

``worker/checkpoint/dense_parts.py`` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import DataLoss
from .entries import FileFacts
from .state_tree import decode_tree

FOLDER = "dense"  # within the folder of the checkpoint
TREE = "dense"  # the key in the state of worker 0


def facts_of(saved: Mapping[str, Any], where: str) -> list[FileFacts]:
    """Returns the facts of the files in the tree that was saved under ``TREE``.

    Args:
        saved: the tree.
        where: the name of the file that has it, for error texts.

    Raises:
        DataLoss: the tree has no such list.
    """
    try:
        return [FileFacts(str(each["file"]), int(each["bytes"]), str(each["xxh3"])) for each in saved["files"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataLoss(f"{where}: is damaged: its list of dense files cannot be read: {error!r}") from None


def dense_files(state: memoryview, where: str) -> list[FileFacts]:
    """Returns the facts of the files that belong to a state of worker 0; [] when its dense side was whole.

    Args:
        state: the bytes of the state's file.
        where: the name of the file, for error texts.

    Raises:
        DataLoss: the state is damaged.
    """
    tree = decode_tree(state, where, lambda array, _: array)
    return facts_of(tree[TREE], where) if TREE in tree else []
