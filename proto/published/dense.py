"""Dense weights that were published after a version, while training went on: numbered folders beside its program, each
whole when its manifest is there. The version itself never changes.

ROOT/MODEL/v000001/dense/000003/weights.safetensors   every weight of the program, by name
                                proof.json            SHA-256 and signature (program_proof.py)
                              manifest.json         number, training step, size and checksum
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from pydantic import TypeAdapter

from ..checkpoint.folder import Folder, Piece
from ..checkpoint.manifest import FileFacts
from ..documents import Count, Positive, Text, checked, parse_json
from ..errors import DataLoss, NotFound
from .manifest import MANIFEST
from .program_proof import ProgramProof
from .row_parts import read_file
from .shared_file import signature

WEIGHTS = "weights.safetensors"
PROOF = "proof.json"  # beside the manifest, whose members the version before knows by heart
CLAIM = "claim.json"  # by the process that writes them
_GIVEN_UP_SEC = 3600.0  # after which a claim without a manifest is of a process that has ended
_KEPT = 2  # a reader that has just seen the one before the newest may still read it
_MOST_BYTES = 65536  # of a manifest or a claim
_NUMBER = re.compile(r"(\d{6,18})")


@dataclass(frozen=True)
class DenseVersion:
    """Dense weights of a version.

    Attributes:
        number: counts from 1.
        step: of training.
        created: UTC, ISO 8601.
        weights: the file.
    """

    number: Positive
    step: Count
    created: Text
    weights: FileFacts


_DENSE_VERSION = TypeAdapter(DenseVersion)


def newest_number(version: Folder) -> int:
    """Of the dense weights below a version's folder; 0: there are none."""
    folder = version / "dense"
    numbers = sorted((int(match[1]) for name in folder.names() if (match := _NUMBER.fullmatch(name))), reverse=True)
    return next((number for number in numbers if _folder(version, number).exists(MANIFEST)), 0)


def read_dense(version: Folder, number: int) -> tuple[DenseVersion, memoryview]:
    """What is known of them, and their file.

    Raises:
        NotFound: they are not there (any more).
        DataLoss: they are damaged.
    """
    folder = _folder(version, number)
    where = f"{folder.url}/{MANIFEST}"
    facts = checked(_DENSE_VERSION, parse_json(folder.read_small(MANIFEST, _MOST_BYTES), where, _MOST_BYTES), where)
    return facts, read_file(folder, facts.weights)


def dense_facts(number: int, weights: FileFacts) -> FileFacts:
    """A file of weights, named below its version's folder as its proof does."""
    return FileFacts(f"dense/{number:06d}/{weights.file}", weights.bytes, weights.xxh3)


def read_dense_proof(version: Folder, number: int) -> ProgramProof | None:
    """The proof of dense weights; None: the version before wrote them.

    Raises:
        DataLoss: it is damaged.
    """
    folder = _folder(version, number)
    if not folder.exists(PROOF):
        return None
    try:
        return ProgramProof(**json.loads(bytes(folder.read(PROOF))))
    except (ValueError, TypeError) as error:
        raise DataLoss(f"{folder.url}/{PROOF}: is damaged: {error}") from None


def write_dense(
    version: Folder,
    pieces: Sequence[Piece],
    size: int,
    xxh3: str,
    step: int,
    prove: Callable[[FileFacts], ProgramProof] | None = None,
) -> DenseVersion:
    """Writes the next ones, and removes those that no version needs any more.

    Args:
        version: its folder.
        pieces, size, xxh3: of the file of weights.
        step: of training.
        prove: makes the proof of the file; None: they have none.
    """
    while True:
        number = max((int(name) for name in (version / "dense").names() if _NUMBER.fullmatch(name)), default=0) + 1
        folder = _folder(version, number)
        if folder.create(CLAIM, signature()):
            break
    folder.write(WEIGHTS, pieces)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = DenseVersion(number, step, created, FileFacts(WEIGHTS, size, xxh3))
    if prove is not None:
        folder.put(PROOF, json.dumps(asdict(prove(dense_facts(number, facts.weights)))).encode() + b"\n")
    folder.put(MANIFEST, json.dumps(asdict(facts), indent=2).encode() + b"\n")
    for name in (version / "dense").names():
        if _NUMBER.fullmatch(name) and int(name) <= number - _KEPT and _is_over(_folder(version, int(name))):
            _folder(version, int(name)).remove()
    return facts


def _is_over(folder: Folder) -> bool:
    """Whether weights are whole, or were given up; not those that another process writes now."""
    if folder.exists(MANIFEST):
        return True
    try:
        claim = parse_json(folder.read_small(CLAIM, _MOST_BYTES), CLAIM, _MOST_BYTES)
    except NotFound:  # of a program that made no claims, or they were removed just now
        return True
    except DataLoss:  # it is being written, or damaged
        return False
    claimed_at = claim.get("time") if isinstance(claim, dict) else None
    return isinstance(claimed_at, int | float) and claimed_at < time.time() - _GIVEN_UP_SEC


def _folder(version: Folder, number: int) -> Folder:
    return version / "dense" / f"{number:06d}"
