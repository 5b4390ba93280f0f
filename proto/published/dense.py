"""Dense weights that were published after a version, while training went on, in numbered folders beside its program.

A folder is complete when its manifest is there. The version itself never changes.

ROOT/MODEL/v000001/dense/000003/weights.safetensors   every weight of the program, by name
                                manifest.json         number, training step, size, checksums and signature
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from ..checkpoint.folder import Folder, Piece
from ..documents import Count, Positive, Text, checked, parse_json
from ..errors import DataLoss, NotFound
from ..security.security import Security
from .manifest import MANIFEST, HashedFile
from .proof import Proof, check_proof, make_proof
from .row_parts import read_file, write_file
from .shared_file import signature

WEIGHTS = "weights.safetensors"
CLAIM = "claim.json"  # made by the process that writes the weights
_GIVEN_UP_SEC = 3600.0  # age at which the writer of a claim without a manifest counts as ended
_KEPT = 2  # weights that stay: a reader may still read those before the newest
_MOST_BYTES = 65536  # the largest size of a manifest or a claim
_NUMBER = re.compile(r"(\d{6,18})")

Prove: TypeAlias = Callable[[dict[str, Any]], Proof | None]  # from the fields of a manifest
CheckProof: TypeAlias = Callable[[dict[str, Any], Proof | None, str], None]  # the third is the name of the manifest


@dataclass(frozen=True)
class DenseVersion:
    """Facts about one set of dense weights of a version.

    Attributes:
        number: the number of the set, counted from 1.
        step: the training step that the weights come from.
        created: the time of publication in UTC, ISO 8601.
        weights: the file of the weights.
        proof: the signature of the publisher; None when it had no signing key.
    """

    number: Positive
    step: Count
    created: Text
    weights: HashedFile
    proof: Proof | None = None


_DENSE_VERSION = TypeAdapter(DenseVersion)


def newest_number(version: Folder) -> int:
    """Returns the number of the newest dense weights below a version's folder; 0 when there are none."""
    folder = version / "dense"
    numbers = sorted((int(match[1]) for name in folder.names() if (match := _NUMBER.fullmatch(name))), reverse=True)
    return next((number for number in numbers if _folder(version, number).exists(MANIFEST)), 0)


def prove_dense(model: str, version: int, security: Security) -> Prove:
    """Returns a function that signs dense weights of a version, when the security file names a signing key."""
    return lambda fields: make_proof("dense weights", {**fields, "model": model, "version": version}, security)


def check_dense(model: str, version: int, security: Security) -> CheckProof:
    """Returns a function that checks the signature of dense weights of a version, when there is a verification key."""

    def check(fields: dict[str, Any], proof: Proof | None, where: str) -> None:
        # The model and the version come last, because a crafted manifest may name others.
        check_proof("dense weights", {**fields, "model": model, "version": version}, proof, security, where)

    return check


def read_dense(version: Folder, number: int, check: CheckProof = lambda *_: None) -> tuple[DenseVersion, memoryview]:
    """Returns the facts about dense weights, and the bytes of their file.

    Args:
        version: the folder of the version.
        number: the number of the weights.
        check: checks the proof, before the weights are read.

    Raises:
        NotFound: the weights do not exist, or no longer.
        DataLoss: the weights are damaged.
        FailedPrecondition: ``check`` raised it.
    """
    folder = _folder(version, number)
    where = f"{folder.url}/{MANIFEST}"
    document = parse_json(folder.read_small(MANIFEST, _MOST_BYTES), where, _MOST_BYTES)
    facts = checked(_DENSE_VERSION, document, where)
    if facts.number != number:
        raise DataLoss(f"{where}: is damaged: number: {facts.number} is not allowed; allowed here: {number}")
    check(document, facts.proof, where)
    return facts, read_file(folder, facts.weights)


def write_dense(version: Folder, pieces: Sequence[Piece], step: int, prove: Prove = lambda _: None) -> DenseVersion:
    """Writes new dense weights, and removes those that are no longer needed.

    Args:
        version: the folder of the version.
        pieces: the contents of the file of weights, in order.
        step: the training step that the weights come from.
        prove: makes the proof.

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
        created = datetime.now(UTC).isoformat(timespec="seconds")
        facts = DenseVersion(number, step, created, write_file(folder, WEIGHTS, pieces))
        facts = replace(facts, proof=prove(asdict(facts)))
        folder.put(MANIFEST, json.dumps(asdict(facts), indent=2).encode() + b"\n")
    except BaseException:
        for name in (MANIFEST, WEIGHTS):
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
    files = folder.names()  # before the claim is looked for, because a writer makes the folder first
    try:
        claim = parse_json(folder.read_small(CLAIM, _MOST_BYTES), CLAIM, _MOST_BYTES)
    except NotFound:  # a rest of weights that were being removed; an empty folder is one whose claim is to come
        return bool(files)
    except DataLoss:  # the claim is being written, or is damaged
        return False
    claimed_at = claim.get("time") if isinstance(claim, dict) else None
    return isinstance(claimed_at, int | float) and claimed_at < time.time() - _GIVEN_UP_SEC


def _folder(version: Folder, number: int) -> Folder:
    return version / "dense" / f"{number:06d}"
