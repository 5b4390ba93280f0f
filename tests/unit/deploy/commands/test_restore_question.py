"""`checkpoint restore` says what it replaces before it asks."""

from __future__ import annotations

from pathlib import Path

from checkpoint_rows import checkpoint_without_rows
from sparserow.deploy.commands.checkpoint import _replaced
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema


def test_namespaces_tables_and_rows_are_listed(tmp_path: Path) -> None:
    checkpoint_without_rows(Folder(str(tmp_path)), 7, TableSchema("ads", "user", 8, SGD()), 64)
    request = pb.RestoreRequest(url=str(tmp_path))
    assert list(_replaced(request)) == ["namespace ads: user (0 rows)"]
    assert request.name == "save-000001", "a newer one is not restored in its place"
    request.renames.append(pb.TableRename(saved="ads/user", name="shop/buyer"))
    assert list(_replaced(request)) == ["namespace shop: buyer (0 rows)"]
