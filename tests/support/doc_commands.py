"""Calls of ``sparserow`` in text of a shell, wherever they stand in a line."""

from __future__ import annotations

import re
import shlex

# Words that run the command behind them, and those of the shell's own language.
_BEFORE = frozenset(
    {
        *("sudo", "time", "env", "nohup", "exec", "nice", "command", "timeout", "watch", "setsid", "ionice", "taskset"),
        *("torchrun", "kubectl", "docker", "ssh", "srun", "uv"),
        *("if", "then", "else", "elif", "while", "until", "do", "!", "{", "("),
    }
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SEPARATOR = re.compile(r"(?:\$\(|&&|\|\||[|;>&](?=\s|$))")


def sparserow_commands(text: str) -> list[list[str]]:
    """Words of each call behind ``sparserow``; lines that a backslash continues are one."""
    found = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = re.sub(r"(?:^|\s)#.*", "", line).strip().removeprefix("$ ")
        for part in _SEPARATOR.split(line):
            words = _words(part)
            place = next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "sparserow"), None)
            if place is not None and (place == 0 or words[0] in _BEFORE or _ASSIGNMENT.match(words[0])):
                found.append(words[place + 1 :])
    return found


def _words(part: str) -> list[str]:
    part = part.rstrip("\\…. )")
    try:
        return shlex.split(part)
    except ValueError:  # an apostrophe, or a quote that is closed elsewhere
        return part.split()
