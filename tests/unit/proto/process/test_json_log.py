"""Lines of a server's log: plain, and JSON with the fields that an event has."""

from __future__ import annotations

import json
import logging

import pytest

from sparserow.proto.config.log_config import LogConfig
from sparserow.proto.options.document import validate
from sparserow.proto.process.logs import start_log


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]


def test_fields_are_members_of_the_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    start_log("shard 1", validate(LogConfig, {"format": "json", "level": "info"}))
    logging.getLogger("sparserow.x").info("refused %s", "PULL", extra={"fields": {"request": 7, "worker": 3}})
    event = json.loads(capsys.readouterr().err)
    assert event.pop("time") > 0
    assert event == {
        "level": "info",
        "role": "shard 1",
        "logger": "sparserow.x",
        "message": "refused PULL",
        "request": 7,
        "worker": 3,
    }


def test_a_plain_line_has_the_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    start_log("shard 1", validate(LogConfig, {"format": "plain", "level": "info"}))
    logging.getLogger("sparserow.x").info("refused", extra={"fields": {"request": 7}})
    logging.getLogger("sparserow.x").debug("not asked for")
    assert capsys.readouterr().err.endswith("info    shard 1: refused\n")
