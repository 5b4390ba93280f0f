"""The folder of a shard's rows on the SSD, with the names of their tables for ``sparserow inspect``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from ...cpp_ext import _server
from ...proto.errors import InvalidArgument, ResourceExhausted
from ...proto.process.whole_file import write_whole

log = logging.getLogger(__name__)


class SsdFolder:
    """The folder ``shard-N`` of one shard, which is made where it is missing.

    Args:
        ssd_path: the folder of the shards' folders.
        shard: the index of the shard.

    Attributes:
        path: the path of the folder.

    Raises:
        InvalidArgument: ``ssd_path`` is missing, or cannot be written.
    """

    def __init__(self, ssd_path: str, shard: int) -> None:
        parent = Path(ssd_path)
        if not parent.is_dir():
            raise InvalidArgument(f"ssd_path: {parent} is not a folder; create it on the disk that is to have the rows")
        self.path = parent / f"shard-{shard}"
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"ssd_path: the folder {parent} cannot be written: {error.strerror}") from None

    def write_table_names(self, tables: Iterable[_server.TableStats]) -> None:
        """Writes the names of the tables for ``sparserow inspect``, because rows on the SSD have only ids."""
        lines = [f"{table.table_id} {table.name}\n" for table in tables]
        try:
            write_whole(self.path / "TABLES", "".join(lines))
        except ResourceExhausted as error:
            log.warning("the tables' names could not be written: %s", error)
