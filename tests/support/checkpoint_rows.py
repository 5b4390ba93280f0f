"""The rows of a checkpoint as plain values, for comparison."""

from __future__ import annotations

from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.row_parts import Rows, decode_rows
from sparserow.proto.names import is_file_table
from sparserow.proto.schema import TableSchema


def rows_of_checkpoint(url, name=None) -> dict[str, dict[int, tuple]]:
    """Every row of a checkpoint but those of files: table -> key -> (version, updates, weights, state)."""
    manifest = files.read_manifest(Folder(str(url)), name)
    found: dict[str, dict[int, tuple]] = {}
    read: dict[str, dict[int, Rows]] = {}  # by file and table id
    for table in manifest.tables:
        if is_file_table(table.schema.name):
            continue
        rows = found.setdefault(table.schema.full_name, {})
        for part in table.parts:
            if part.file not in read:
                parts = decode_rows((Folder(str(url)) / manifest.name).read(part.file), part.file)
                read[part.file] = {facts.table_id: columns for facts, columns in parts}
            columns = read[part.file][table.schema.id]
            for i, key in enumerate(columns.keys.tolist()):
                assert key not in rows
                rows[key] = (
                    int(columns.versions[i]),
                    int(columns.update_counts[i]),
                    columns.weights[i].tobytes(),
                    columns.state[i].tobytes(),
                )
    return found


def checkpoint_without_rows(folder: Folder, cluster_id: int, schema: TableSchema, slot_count: int) -> files.Manifest:
    """Writes a checkpoint of one table and one shard that has no rows; its manifest."""
    manifest = files.Manifest(
        name=files.begin_folder(folder),
        created=files.now_text(),
        cluster_id=cluster_id,
        slot_count=slot_count,
        shards=1,
        lineage=1,
        tables=(files.TableEntry(schema, ()),),
    )
    (folder / manifest.name).put(files.FILE, manifest.to_bytes())
    return manifest
