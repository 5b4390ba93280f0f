"""The models in a folder given by a URL: their versions, and the aliases that name versions.

A version never changes, and belongs to the process that claimed its number. All aliases of a model are in one small
file.
The file is replaced in one instant, so a reader sees it before or after a move. Processes change it one after another
(shared_file.py). A rollback uses the ``history`` of an alias.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter

from ..checkpoint.folder import Folder
from ..documents import Positive, Share, Text, checked, parse_json
from ..errors import DataLoss, FailedPrecondition, NotFound, not_allowed
from ..security.security import Security
from .manifest import MANIFEST, MOST_BYTES, ModelManifest
from .model_names import NAME_PATTERN, check_name, is_version
from .shared_file import MOST_BYTES as MOST_ALIASES_BYTES, SharedFile, signature

ALIASES = "aliases.json"
CLAIM = "claim.json"  # in a version's folder: made by the process that publishes it
_VERSION = re.compile(r"v(\d{6,18})")
_MOST_HISTORY = 1000
_MOST_CLAIM_BYTES = 65536
_GIVEN_UP_SEC = 86_400.0  # age at which the publisher of a version without a manifest counts as ended


@dataclass(frozen=True)
class Alias:
    """The versions that an alias names.

    Attributes:
        version: the version that the alias names.
        canary: another version, which answers the share ``canary_share`` of routing keys; None when there is none.
        canary_share: the share of routing keys, in [0, 1].
        history: the versions that the alias named before, the latest last; at most 1,000 are kept.
    """

    version: Positive
    canary: Positive | None = None
    canary_share: Share = 0.0
    history: tuple[Positive, ...] = field(default=())

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that must be served for this alias."""
        return (self.version,) if self.canary is None else (self.version, self.canary)


_ALIASES = TypeAdapter(dict[Annotated[Text, AfterValidator(lambda name: check_name("alias", name))], Alias])


class ModelRegistry:
    """The models below a folder.

    Args:
        root: a path or URL (fsspec), such as ``s3://bucket/models``.
    """

    def __init__(self, root: str) -> None:
        self.root = Folder(root)

    def models(self) -> list[str]:
        """Returns the names of the models that have a version."""
        return [name for name in self.root.names() if NAME_PATTERN.fullmatch(name) and self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """Returns the complete versions of a model, ascending; the list is empty when there is no such model."""
        folder = self.root / check_name("model", model)
        found = (int(match[1]) for name in folder.names() if (match := _VERSION.fullmatch(name)))
        return sorted(version for version in found if self.folder(model, version).exists(MANIFEST))

    def folder(self, model: str, version: int) -> Folder:
        """Returns the folder of a version."""
        return self.root / check_name("model", model) / f"v{version:06d}"

    def manifest(self, model: str, version: int) -> ModelManifest:
        """Returns the manifest of a version, whose signature is not checked: for those who write the registry.

        Raises:
            NotFound: there is no such version; the text names the existing versions.
            DataLoss: the manifest is damaged.
        """
        return self._manifest(model, version, None)

    def trusted_manifest(self, model: str, version: int, security: Security) -> ModelManifest:
        """Returns the manifest of a version for a reader, who uses what it names.

        Args:
            model, version: the name of the model and the number of the version.
            security: names the keys of trusted publishers; without a verification key no signature is checked.

        Raises:
            NotFound: there is no such version; the text names the existing versions.
            DataLoss: the manifest is damaged.
            FailedPrecondition: there is a verification key, and no trusted publisher signed the manifest as it is.
        """
        return self._manifest(model, version, security)

    def _manifest(self, model: str, version: int, security: Security | None) -> ModelManifest:
        folder = self.folder(model, version)
        if not folder.exists(MANIFEST):
            known = ", ".join(map(str, self.versions(model))) or "none"
            raise NotFound(f"model {model!r} at {self.root.url}: has no version {version}; it has: {known}")
        where = f"{folder.url}/{MANIFEST}"
        manifest = ModelManifest.from_json(folder.read_small(MANIFEST, MOST_BYTES), where, security)
        if (manifest.model, manifest.version) != (model, version):
            said = f"model {manifest.model!r} and version {manifest.version}"
            raise DataLoss(f"{where}: is damaged: it names {said}; allowed here: {model!r} and {version}")
        return manifest

    def claim_version(self, model: str) -> int:
        """Reserves a version number for the caller that no publication has used, not even an unfinished one."""
        while True:
            version = max(self._numbers(model), default=0) + 1
            if not self.folder(model, version).create(CLAIM, signature()):
                continue
            later = (number for number in self._numbers(model) if number > version)
            if not any(self.folder(model, number).exists(MANIFEST) for number in later):
                return version  # otherwise a version of this number was published and pruned meanwhile

    def finish(self, manifest: ModelManifest) -> None:
        """Makes a version complete, by writing its manifest after all of its files.

        Raises:
            FailedPrecondition: a file is missing, because :meth:`prune` took the publication for one that was given up.
            FailedPrecondition, ResourceExhausted: the manifest cannot be written.
        """
        folder = self.folder(manifest.model, manifest.version)
        there = set(folder.names())
        missing = next((file.file for file in manifest.files if file.file not in there), None)
        if missing is not None:
            raise FailedPrecondition(f"{folder.url}/{missing}: was removed while the version was published; try again")
        folder.put(MANIFEST, manifest.to_json())

    def abandon(self, model: str, version: int) -> None:
        """Removes the files of a publication that is not finished. Its number stays used."""
        folder = self.folder(model, version)
        for name in sorted(folder.names(), key=lambda name: name != MANIFEST):
            if name != CLAIM:
                folder.delete(name)

    def _numbers(self, model: str) -> list[int]:
        folder = self.root / check_name("model", model)
        return [int(match[1]) for name in folder.names() if (match := _VERSION.fullmatch(name))]

    def aliases(self, model: str) -> dict[str, Alias]:
        """Returns the aliases of a model by name; empty when there is no such model.

        Raises:
            DataLoss: the file of the aliases is damaged.
        """
        return self._parsed(model, self._aliases_file(model).read())

    def resolve(self, model: str, which: str) -> Alias:
        """Returns the versions that ``NAME@which`` names.

        Args:
            model: the name of the model.
            which: an alias, or the number of a version.

        Raises:
            NotFound: there is no such model, alias or version; the text names the existing ones.
        """
        if not is_version(which):  # one request, however many versions there are, as servers look often
            return self._known(model, which, self.aliases(model))
        if self.folder(model, int(which)).exists(MANIFEST):
            return Alias(int(which))
        versions = self.versions(model)
        if not versions:
            raise self._no_model(model)
        raise NotFound(f"model {model!r}: has no version {which}; it has: {', '.join(map(str, versions))}")

    def point(self, model: str, alias: str, version: int) -> Alias:
        """Lets an alias name a version, and ends its canary.

        Raises:
            NotFound: there is no such version.
        """
        check_name("alias", alias)
        self.manifest(model, version)  # a claim would make a folder for a model that does not exist

        def point(aliases: dict[str, Alias]) -> Alias:
            self.manifest(model, version)
            before = aliases.get(alias)
            history = () if before is None else before.history
            if before is not None and before.version != version:
                history = (*history, before.version)
            return Alias(version, history=history[-_MOST_HISTORY:])

        return self._move(model, alias, point)

    def canary(self, model: str, alias: str, version: int, share: float) -> Alias:
        """Lets another version answer a share of an alias's routing keys.

        Args:
            model, alias: the model and its alias.
            version: the version that becomes the canary.
            share: the share of routing keys, in (0, 1].

        Raises:
            InvalidArgument: ``share`` is not in (0, 1].
            NotFound: there is no such alias or version.
        """
        if not 0 < share <= 1:
            raise not_allowed("canary share", share, "(0, 1]")
        check_name("alias", alias)
        self._known(model, alias, self.aliases(model))

        def begin(aliases: dict[str, Alias]) -> Alias:
            before = self._known(model, alias, aliases)
            self.manifest(model, version)
            return replace(before, canary=version, canary_share=share)

        return self._move(model, alias, begin)

    def rollback(self, model: str, alias: str) -> Alias:
        """Lets an alias name the version that it named before.

        Raises:
            NotFound: there is no such alias.
            FailedPrecondition: the alias has named no other version that still exists.
        """
        check_name("alias", alias)
        self._known(model, alias, self.aliases(model))

        def go_back(aliases: dict[str, Alias]) -> Alias:
            before = self._known(model, alias, aliases)
            there = set(self.versions(model))
            history = [version for version in before.history if version in there]
            while history and history[-1] == before.version:  # what was between the two is pruned
                history.pop()
            if not history:
                raise FailedPrecondition(
                    f"{model}@{alias}: the alias has named no earlier version than {before.version} that still exists"
                )
            return Alias(history[-1], history=tuple(history[:-1]))

        return self._move(model, alias, go_back)

    def prune(self, model: str, keep: int) -> list[int]:
        """Removes the oldest versions of a model.

        The newest ``keep`` versions stay, and the versions that an alias names or named last before. The files of a
        publication that did not end within a day of its beginning are removed as well.

        Returns:
            The removed versions, ascending, with those that were never complete.

        Raises:
            InvalidArgument: ``keep`` is below 1.
            NotFound: there is no such model.
        """
        if keep < 1:
            raise not_allowed("keep", keep, ">= 1")
        if not self._numbers(model):
            raise self._no_model(model)
        gone: list[int] = []

        def choose(content: bytes | None) -> None:
            versions = self.versions(model)
            needed = set(versions[-keep:])
            for alias in self._parsed(model, content).values():
                needed.update(alias.versions)
                needed.update(alias.history[-1:])
            gone[:] = [version for version in versions if version not in needed]
            for version in gone:  # without its manifest a version is none, and no alias can move there
                self.folder(model, version).delete(MANIFEST)

        self._aliases_file(model).change(choose)
        for version in gone:
            self.folder(model, version).remove()
        given_up = [number for number in self._numbers(model) if self._is_given_up(model, number)]
        for number in given_up:
            self.abandon(model, number)
        return sorted((*gone, *given_up))

    def _is_given_up(self, model: str, number: int) -> bool:
        """Whether a version has files and no manifest, and its publication began more than a day ago."""
        folder = self.folder(model, number)
        names = folder.names()
        if MANIFEST in names or CLAIM not in names or names == [CLAIM]:
            return False
        try:
            claim = parse_json(folder.read_small(CLAIM, _MOST_CLAIM_BYTES), CLAIM, _MOST_CLAIM_BYTES)
        except (DataLoss, NotFound):  # the claim is being written, or the version is being removed
            return False
        claimed_at = claim.get("time") if isinstance(claim, dict) else None
        return isinstance(claimed_at, int | float) and claimed_at < time.time() - _GIVEN_UP_SEC

    def _move(self, model: str, alias: str, move: Callable[[dict[str, Alias]], Alias]) -> Alias:
        """Changes one alias while no other process changes an alias of the model."""
        moved: list[Alias] = []

        def change(content: bytes | None) -> bytes:
            aliases = self._parsed(model, content)
            moved[:] = [move(aliases)]
            document = {name: asdict(entry) for name, entry in {**aliases, alias: moved[0]}.items()}
            return json.dumps(document, indent=2).encode() + b"\n"

        self._aliases_file(model).change(change)
        return moved[0]

    def _aliases_file(self, model: str) -> SharedFile:
        return SharedFile(self.root / check_name("model", model), ALIASES)

    def _parsed(self, model: str, content: bytes | None) -> dict[str, Alias]:
        if content is None:
            return {}
        where = f"{(self.root / model).url}/{ALIASES}"
        return checked(_ALIASES, parse_json(content, where, MOST_ALIASES_BYTES), where)

    def _known(self, model: str, alias: str, aliases: dict[str, Alias]) -> Alias:
        if alias not in aliases:
            if not self.versions(model):
                raise self._no_model(model)
            known = ", ".join(sorted(aliases)) or "none"
            raise NotFound(f"model {model!r}: has no alias {alias!r}; it has: {known}")
        return aliases[alias]

    def _no_model(self, model: str) -> NotFound:
        known = ", ".join(self.models()) or "none"
        return NotFound(f"model {model!r}: there is none at {self.root.url}; there are: {known}")
