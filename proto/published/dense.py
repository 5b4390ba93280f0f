"""Dense weights that were published after a version, while training went on, in numbered folders beside its program.

A folder is complete when its manifest is there. The version itself never changes.

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
PROOF = "proof.json"  # beside the manifest, because the previous version knows a fixed set of its members
CLAIM = "claim.json"  # made by the process that writes the weights
_GIVEN_UP_SEC = 3600.0  # age at which the writer of a claim without a manifest counts as ended
_KEPT = 2  # weights that stay: a reader may still read those before the newest
_MOST_BYTES = 65536  # the largest size of a manifest or a claim
_NUMBER = re.compile(r"(\d{6,18})")


@dataclass(frozen=True)
class DenseVersion:
    """Facts about one set of dense weights of a version.

    Attributes:
        number: the number of the set, counted from 1.
        step: the training step that the weights come from.
        created: the time of publication in UTC, ISO 8601.
        weights: the file of the weights.
    """

    number: Positive
    step: Count
    created: Text
    weights: FileFacts


_DENSE_VERSION = TypeAdapter(DenseVersion)


def newest_number(version: Folder) -> int:
    """Returns the number of the newest dense weights below a version's folder; 0 when there are none."""
    folder = version / "dense"
    numbers = sorted((int(match[1]) for name in folder.names() if (match := _NUMBER.fullmatch(name))), reverse=True)
    return next((number for number in numbers if _folder(version, number).exists(MANIFEST)), 0)


def read_dense(version: Folder, number: int) -> tuple[DenseVersion, memoryview]:
    """Returns the facts about dense weights, and the bytes of their file.

    Args:
        version: the folder of the version.
        number: the number of the weights.

    Raises:
        NotFound: the weights do not exist, or no longer.
        DataLoss: the weights are damaged.
    """
    folder = _folder(version, number)
    where = f"{folder.url}/{MANIFEST}"
    facts = checked(_DENSE_VERSION, parse_json(folder.read_small(MANIFEST, _MOST_BYTES), where, _MOST_BYTES), where)
    return facts, read_file(folder, facts.weights)


def dense_facts(number: int, weights: FileFacts) -> FileFacts:
    """Returns the facts of a file of weights under the name that its proof uses, relative to the version's folder."""
    return FileFacts(f"dense/{number:06d}/{weights.file}", weights.bytes, weights.xxh3)


def read_dense_proof(version: Folder, number: int) -> ProgramProof | None:
    """Returns the proof of dense weights; None when a program of the previous version wrote them.

    Raises:
        DataLoss: the proof is damaged.
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
    """Writes new dense weights, and removes those that are no longer needed.

    Args:
        version: the folder of the version.
        pieces, size, xxh3: the contents of the file of weights, its size in bytes and its checksum.
        step: the training step that the weights come from.
        prove: makes the proof of the file; None writes no proof.

    Returns:
        The facts about the written weights.

    Raises:
        NotFound: there is no such version any more.
        FailedPrecondition, ResourceExhausted: the weights cannot be written; only their number stays used.
    """
    if not version.exists(MANIFEST):
        raise NotFound(f"{version.url}: the version was removed, so it takes no dense weights; publish a new version")
    while True:
        number = max((int(name) for name in (version / "dense").names() if _NUMBER.fullmatch(name)), default=0) + 1
        folder = _folder(version, number)
        if folder.create(CLAIM, signature()):
            break
    try:
        folder.write(WEIGHTS, pieces)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        facts = DenseVersion(number, step, created, FileFacts(WEIGHTS, size, xxh3))
        if prove is not None:
            folder.put(PROOF, json.dumps(asdict(prove(dense_facts(number, facts.weights)))).encode() + b"\n")
        folder.put(MANIFEST, json.dumps(asdict(facts), indent=2).encode() + b"\n")
    except BaseException:
        for name in (MANIFEST, PROOF, WEIGHTS):
            folder.delete(name)
        raise
    for name in (version / "dense").names():
        if _NUMBER.fullmatch(name) and int(name) <= number - _KEPT and _is_over(_folder(version, int(name))):
            _folder(version, int(name)).remove()
    return facts


def _is_over(folder: Folder) -> bool:
    """Whether weights are complete or were given up, so that no process is writing them now."""
    if folder.exists(MANIFEST):
        return True
    try:
        claim = parse_json(folder.read_small(CLAIM, _MOST_BYTES), CLAIM, _MOST_BYTES)
    except NotFound:  # an older program made no claims, or the weights were just removed
        return True
    except DataLoss:  # the claim is being written, or is damaged
        return False
    claimed_at = claim.get("time") if isinstance(claim, dict) else None
    return isinstance(claimed_at, int | float) and claimed_at < time.time() - _GIVEN_UP_SEC


def _folder(version: Folder, number: int) -> Folder:
    return version / "dense" / f"{number:06d}"
