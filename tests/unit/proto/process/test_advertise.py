"""What a server tells others of where it is: what is named, and what is chosen where it listens on every address."""

from __future__ import annotations

import socket

import pytest

from sparserow.proto.errors import InvalidArgument, Unavailable
from sparserow.proto.process import advertise
from sparserow.proto.process.advertise import Advertised, advertised, parse_advertise


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("ps-0.ps", "ps-0.ps", None),
        ("ps_0:7001", "ps_0", 7001),
        ("10.0.0.5", "10.0.0.5", None),
        ("10.0.0.5:7001", "10.0.0.5", 7001),
        ("fd00::2", "fd00::2", None),
        ("[fd00::2]", "fd00::2", None),
        ("[fd00::2]:7001", "fd00::2", 7001),
    ],
)
def test_what_is_named_is_told(text: str, host: str, port: int | None) -> None:
    told = parse_advertise(text)
    assert told == Advertised(host, port)
    assert told == advertised(text, "0.0.0.0", None)
    shown = f"[{host}]" if ":" in host else host
    assert told.address(9) == f"{shown}:{port or 9}"


@pytest.mark.parametrize(
    "text",
    ["", "0.0.0.0", "::", "0.0.0.0:7001", "[::]:7001", "a b", "-a", "a:", "a:0", "a:65536", "a:x", ":7001", "[a"],
)
def test_what_nobody_could_dial_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="allowed: HOST or HOST:PORT") as refused:
        parse_advertise(text)
    assert f"--advertise: {text!r}" in str(refused.value)


def test_an_address_listened_on_is_told() -> None:
    assert advertised(None, "127.0.0.1", "10.0.0.1:7000") == Advertised("127.0.0.1")


def test_of_every_address_the_one_that_reaches_the_coordinator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advertised(None, "0.0.0.0", "127.0.0.1:7000") == Advertised("127.0.0.1")
    with pytest.raises(Unavailable, match=r"coordinator nowhere\.invalid:7000: no interface of this host reaches it"):
        advertised(None, "0.0.0.0", "nowhere.invalid:7000")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert advertised(None, "0.0.0.0", None) == Advertised("localhost")


def test_a_name_that_does_not_resolve_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    monkeypatch.setattr(advertise, "_interface_towards", lambda *_: "192.0.2.9")
    assert advertised(None, "0.0.0.0", None) == Advertised("192.0.2.9")

    def no_route(*_: object) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(advertise, "_interface_towards", no_route)
    with pytest.raises(InvalidArgument, match=r"name 'nowhere\.invalid' does not resolve; name with --advertise"):
        advertised(None, "0.0.0.0", None)
