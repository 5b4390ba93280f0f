"""Calls with values in place of keys: files that cannot be read, texts that are none, processes without the version."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from sparserow.proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, SparserowError
from sparserow.proto.grpc_status import status_of_error
from sparserow.proto.published import feature_files
from sparserow.serving.client.replica_map import make_keys
from sparserow.serving.version_features import FeatureValues, VersionFeatures


def test_what_cannot_be_read_is_not_read_anew_for_each_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def failing(*_: object) -> Any:
        reads.append(1)
        raise DataLoss("features.json: damaged")

    monkeypatch.setattr(feature_files, "read_features", failing)
    features, now = VersionFeatures(Folder(str(tmp_path)), (), "ctr@1"), [100.0]
    monkeypatch.setattr("sparserow.serving.version_features.time.monotonic", lambda: now[0])
    for _ in range(3):
        with pytest.raises(DataLoss, match=r"features\.json: damaged"):
            features.keys(FeatureValues("user", ["u"]))
    assert len(reads) == 1
    now[0] += 5.0  # the storage may be back
    with pytest.raises(DataLoss):
        features.keys(FeatureValues("user", ["u"]))
    assert len(reads) == 2


def test_without_arrow_values_are_refused_with_what_mends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "sparserow.proto.features.value_keys", raising=False)
    features = VersionFeatures(Folder(str(tmp_path)), (), "ctr@1")
    with pytest.raises(FailedPrecondition, match="need pyarrow, which is not installed; pip install pyarrow, or serve"):
        features.keys(FeatureValues("user", ["u"]))


@pytest.mark.parametrize("value", ["\ud800", "a\udc80b"])
def test_a_text_with_half_of_a_pair_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"table 'users': values: .* without half of a surrogate pair"):
        FeatureValues.checked("user", ["ok", value], "table 'users'")
    assert FeatureValues.checked("user", ["Zoë 😀", 7], "table 'users'").values == ["Zoë 😀", "7"]


class Process(pb_grpc.ServingServicer):
    """A serving process that answers with a key, or refuses."""

    def __init__(self, refusal: SparserowError | None) -> None:
        self._refusal = refusal

    def MakeKeys(self, request: pb.MakeKeysRequest, context: Any) -> pb.MakeKeysReply:
        if self._refusal is not None:
            code, message, metadata = status_of_error(self._refusal)
            context.set_trailing_metadata(metadata)
            context.abort(code, message)
        return pb.MakeKeysReply(version=2, keys=[7] * len(request.values))


def test_a_process_that_has_not_loaded_the_version_yet_is_passed_over() -> None:
    def asked(*refusals: SparserowError | None) -> list[int]:
        servers, addresses = [], []
        try:
            for refusal in refusals:
                server = grpc.server(ThreadPoolExecutor(1))
                pb_grpc.add_ServingServicer_to_server(Process(refusal), server)
                addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
                server.start()
                servers.append(server)
            request = pb.MakeKeysRequest(model="ctr@2", feature="user", values=["u"])
            return list(make_keys(addresses, request, deadline_sec=30).keys)
        finally:
            for server in servers:
                server.stop(None)

    without = NotFound("model 'ctr' has no version 2")
    assert asked(without, None) == [7]
    with pytest.raises(NotFound, match="has no version 2"):
        asked(without, without)
    with pytest.raises(InvalidArgument, match="a value is no number"):
        asked(InvalidArgument("feature 'age': a value is no number"), None)
