"""Security files that change at an awkward moment: what was read last is what is there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparserow.deploy.launch.security_files import add_token, init_security, revoke_token
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security import fresh_security as watch
from sparserow.proto.security.security import Security, process_security, use_security
from sparserow_process import DEADLINE_SEC


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files with three tokens, which are this process's."""
    path = init_security(tmp_path / "security", ["127.0.0.1"], valid_sec=3600)
    for name in ("first", "second", "third"):
        add_token(path.parent / "tokens.yaml", name, "train", ())
    monkeypatch.setattr(watch, "_LOOK_SEC", 0.01)
    use_security(path)
    yield path.parent
    use_security(None)


def names() -> set[str]:
    return {token.name for token in process_security().tokens or ()}


async def until_without(name: str) -> None:
    async def look() -> None:
        while name in names():
            await asyncio.sleep(0.01)

    async with watch.fresh_security():
        await asyncio.wait_for(look(), DEADLINE_SEC)


def test_a_token_that_is_revoked_while_the_files_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, tokens = Security.load, folder / "tokens.yaml"

    def revoked_meanwhile(path: str | Path) -> Security:
        read = load(path)
        found = {token.name for token in read.tokens or ()}
        if "first" not in found and "second" in found:
            revoke_token(tokens, "second")
        return read

    monkeypatch.setattr(Security, "load", staticmethod(revoked_meanwhile))

    async def scene() -> None:
        asyncio.get_running_loop().call_later(0.1, revoke_token, tokens, "first")
        await until_without("second")

    asyncio.run(scene())
    assert "third" in names()


def test_a_token_that_is_revoked_before_the_first_look(folder: Path) -> None:
    revoke_token(folder / "tokens.yaml", "first")
    asyncio.run(until_without("first"))
    assert names() >= {"second", "third"}


def test_what_was_refused_is_taken_once_it_is_mended(folder: Path) -> None:
    """Also where no file that is known changes: its mode does, or one that is named comes later."""
    files = watch.FreshSecurity(Security.load(folder / "security.yaml"))
    former = files.now.token

    def look() -> str:
        files._looked_at = -math.inf
        files.look()
        return files.problem

    write_whole(folder / "token", "another", mode=0o644)
    assert "others may read" in look()
    assert files.now.token == former
    (folder / "token").chmod(0o600)
    assert not look()
    assert files.now.token == "another"
    (folder / "security.yaml").write_text((folder / "security.yaml").read_text() + "client_ca: later.pem\n")
    assert "later.pem cannot be read" in look()
    (folder / "later.pem").write_text((folder / "ca.pem").read_text())
    assert not look()
    for name, words in (
        ("ca.pem", "ca: no certificates"),
        ("server.pem", "cert, key: "),
        ("server.key", "cert, key: "),
    ):
        whole = (folder / name).read_text()
        write_whole(folder / name, "half", mode=0o600)
        assert words in look()
        write_whole(folder / name, whole, mode=0o600)
        assert not look()
