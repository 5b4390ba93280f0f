"""A file of a namespace as a checkpoint has it, which is read without a restore."""

from __future__ import annotations

import numpy as np

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import check_file, read_chain
from ...proto.checkpoint.row_parts import decode_rows
from ...proto.row_keys import KeyArray
from ..session.namespace_file import ROW_BYTES, file_of_rows


def saved_file(folder: Folder, name: str, table: str) -> bytes | None:
    """Returns the contents that a file had when a checkpoint was saved; None: there was none.

    Of the checkpoint the parts with the file's rows are read alone.

    Args:
        folder: the folder of the checkpoints.
        name: the name of the checkpoint.
        table: NAMESPACE/NAME of the file's table.

    Raises:
        NotFound: there is no such checkpoint.
        DataLoss: a file that is needed is missing or damaged.
    """
    newest: dict[int, tuple[int, np.ndarray]] = {}
    for manifest in read_chain(folder, name):
        parts = [part for entry in manifest.tables if entry.schema.full_name == table for part in entry.parts]
        for part in parts:
            data = check_file(folder / manifest.name, part)
            of_table = [rows for facts, rows in decode_rows(data, part.file, is_checked=True) if facts.table == table]
            for rows in of_table:
                for key, version, row in zip(rows.keys.tolist(), rows.versions.tolist(), rows.weights, strict=True):
                    if key not in newest or version >= newest[key][0]:
                        newest[key] = (version, row)

    def pull(keys: KeyArray) -> np.ndarray:
        none = (0, np.zeros(ROW_BYTES, dtype=np.float32))
        return np.stack([newest.get(key, none)[1] for key in keys.tolist()]).reshape(len(keys), ROW_BYTES)

    return file_of_rows(pull, f"{folder.url}/{name}, table {table}")
