"""Where a run may start from: not from its own saves, with which it goes on."""

from __future__ import annotations

import pytest

from sparserow.proto.config.started_config import check_start
from sparserow.proto.errors import InvalidArgument


@pytest.mark.parametrize("start_from", ["/ckpt", "/ckpt/", "/ckpt/save-000001", "/ckpt/2026-01-01"])
@pytest.mark.parametrize("url", ["/ckpt", "/ckpt/"])
def test_its_own_saves_are_refused(start_from: str, url: str) -> None:
    with pytest.raises(InvalidArgument, match="is of url, where --resume goes on; name another folder"):
        check_start(start_from, (), url)


@pytest.mark.parametrize("start_from", ["/ckpt2", "/ckpt-of-may/save-000001", "ctr@live", None])
def test_a_folder_whose_name_begins_alike_is_another_one(start_from: str | None) -> None:
    check_start(start_from, (), "/ckpt")


def test_what_is_accepted_needs_a_start() -> None:
    with pytest.raises(InvalidArgument, match="accept: has no effect without start_from"):
        check_start(None, ("user.dim",), "/ckpt")
