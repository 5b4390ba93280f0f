"""``make audit`` does not take what it could not ask about for sound."""

from __future__ import annotations

from audit import summary

SOUND = {"name": "numpy", "version": "2.4.6", "vulns": []}
UNASKED = {"name": "torch", "skip_reason": "not found"}
HURT = {"name": "aiohttp", "version": "3.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1"]}]}


def test_what_is_not_asked_about_is_named() -> None:
    assert summary({"dependencies": [SOUND]}) == (0, ["audit: 1 packages asked about, 0 known vulnerabilities"])
    code, lines = summary({"dependencies": [SOUND, UNASKED]})
    assert (code, lines[-1]) == (2, "audit: NOT ASKED about 1: torch")
    code, lines = summary({"dependencies": [UNASKED]})
    assert (code, lines) == (2, ["audit: NOT DONE: no index of advisories can be reached"])


def test_a_vulnerability_is_named_with_what_mends_it() -> None:
    code, lines = summary({"dependencies": [SOUND, HURT, UNASKED]})
    assert code == 1
    assert lines[0] == "audit: aiohttp 3.0: PYSEC-1: fixed in 3.1"
    assert "1 known vulnerabilities" in lines[1]
