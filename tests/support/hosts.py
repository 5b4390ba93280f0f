"""Hosts of their own on this machine: network namespaces with an address each, joined by a bridge. Needs root."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator

import psutil

_PREFIX = "srt"
_numbers = itertools.count()


def run(*command: str) -> str:
    """Runs a command to its end; what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def why_not() -> str:
    """Why hosts cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip, of the package iproute2"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=120)
    return "" if tried.returncode == 0 else f"no network namespace can be made: {tried.stderr.strip()}"


class Host:
    """One namespace with an interface ``eth0``, whose cable can be pulled."""

    def __init__(self, namespace: str, cable: str, address: str) -> None:
        self.namespace, self.cable, self.address = namespace, cable, address
        self.within = ("ip", "netns", "exec", namespace)  # before a command that shall run here

    def lose(self, percent: int) -> bool:
        """Drops so many of a hundred packets that come in; False where nftables cannot be had."""
        if shutil.which("nft") is None:
            return False
        rules = (
            "add table inet loss",
            "add chain inet loss into { type filter hook input priority 0; }",
            f'add rule inet loss into iifname "eth0" numgen random mod 100 < {percent} counter drop',
        )
        for rule in rules:
            done = subprocess.run([*self.within, "nft", rule], capture_output=True, text=True, timeout=120)
            if done.returncode != 0:
                return False
        return True

    def drop_from(self, address: str) -> bool:
        """Drops every packet that comes from another host; False where nftables cannot be had."""
        if shutil.which("nft") is None:
            return False
        rules = (
            "add table inet broken",
            "add chain inet broken into { type filter hook input priority 0; }",
            f"add rule inet broken into ip saddr {address} drop",
        )
        return all(
            subprocess.run([*self.within, "nft", rule], capture_output=True, timeout=120).returncode == 0
            for rule in rules
        )

    def lost(self) -> int:
        """Packets that :meth:`lose` has dropped."""
        return int(re.findall(r"counter packets (\d+)", run(*self.within, "nft", "list", "ruleset"))[0])

    def cut(self) -> None:
        """Pulls the cable."""
        run("ip", "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Puts it in again."""
        run("ip", "link", "set", self.cable, "up")

    def crash(self) -> None:
        """The power fails: nobody hears a farewell of any process."""
        self.cut()
        for number in run("ip", "netns", "pids", self.namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """Hosts by name, on a network that this process reaches too, for the duration of the block."""
    _sweep()
    tag = f"{_PREFIX}{os.getpid():x}x{next(_numbers)}"
    bridge, made = f"{tag}b", []
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        network = _free_network()
        run("ip", "addr", "add", f"{network[250]}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for index, name in enumerate(names):
            host = Host(f"{tag}-{name}", f"{tag}v{index}", str(network[index + 1]))
            run("ip", "netns", "add", host.namespace)
            made.append(host)
            run("ip", "link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            run("ip", "link", "set", host.cable, "master", bridge, "up")
            for words in (f"addr add {host.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                run("ip", "-n", host.namespace, *words.split())
        yield dict(zip(names, made, strict=True))
    finally:
        for host in made:
            with contextlib.suppress(AssertionError):
                host.crash()
            _remove("link", host.cable)  # else it stays as long as a dead process's connection waits for its peer
            _remove("netns", host.namespace)
        _remove("link", bridge)


def _remove(kind: str, name: str) -> None:
    subprocess.run(["ip", kind, "del", name], capture_output=True, timeout=120)


def _free_network() -> ipaddress.IPv4Network:
    """Of 10.213/16 and 10.214/16, a part that no route of this machine leads to."""
    routes = run("ip", "route")
    while True:
        network = ipaddress.IPv4Network(f"10.{213 + secrets.randbelow(2)}.{secrets.randbelow(256)}.0/24")
        if str(network) not in routes:
            return network


def _sweep() -> None:
    """Removes what tests that were killed have left."""
    named = re.compile(rf"\b({_PREFIX}([0-9a-f]+)x\d+(?:-\w+|b|v\d+))\b")
    for kind, listed in (("netns", run("ip", "netns", "list")), ("link", run("ip", "-br", "link"))):
        for line in listed.splitlines():
            match = named.match(line)
            if match and not psutil.pid_exists(int(match[2], 16)):
                _remove(kind, match[1])
