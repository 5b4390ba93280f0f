"""The versions that a serving process answers from: loaded, followed, swapped and given up as aliases move."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..cpp_ext import _server
from ..proto.errors import NotFound, SparserowError
from ..proto.published.dense import newest_number
from ..proto.published.model_names import handle_of
from ..proto.published.registry import Alias, ModelRegistry
from .client.shard_assignment import ShardAssignment
from .live_sync import Follower, FollowOptions
from .loaded_version import LoadedVersion, load_version
from .row_memory import RowMemory

log = logging.getLogger(__name__)

_CATCH_UP_SEC = 10.0


@dataclass
class Served:
    """A loaded version and what keeps it fresh.

    Attributes:
        follower: None: it does not follow.
        problem: why it does not, although it should.
        unused_since: monotonic seconds; None while an alias names it.
        dense_version: of the newest dense weights that were published with it; 0: there are none.
    """

    loaded: LoadedVersion
    follower: Follower | None = None
    problem: str = ""
    unused_since: float | None = None
    dense_version: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether every slot of this process is complete."""
        if self.loaded.version > 0:
            return True
        return self.follower is not None and self.follower.is_complete


@dataclass(frozen=True)
class ModelsOptions:
    """What is served, and how.

    Args:
        wanted: (model, alias or version) pairs.
        place: whose slots.
        follow: live sync; None: versions stay as they were published.
        memory: for the rows of each version.
        poll_sec: between looks at the aliases.
        grace_sec: how long a version that no alias names is still answered from.
    """

    wanted: tuple[tuple[str, str], ...]
    place: ShardAssignment
    follow: FollowOptions | None = None
    memory: RowMemory = RowMemory()  # noqa: RUF009 - frozen
    poll_sec: float = 0.5
    grace_sec: float = 30.0


@dataclass(frozen=True)
class _Move:
    """An alias that is about to name another version.

    Attributes:
        alias: as it shall be.
        former: the version that it names; stands still.
        until: monotonic seconds, after which it moves in any case.
    """

    alias: Alias
    former: Served
    until: float


@dataclass
class _Book:
    versions: dict[tuple[str, int], Served] = field(default_factory=dict)
    aliases: dict[tuple[str, str], Alias] = field(default_factory=dict)
    problems: dict[tuple[str, str], str] = field(default_factory=dict)

    def namespace_of(self, model: str, alias: Alias) -> str:
        """The namespace whose rows an alias serves; "" while it is not known."""
        served = self.versions.get((model, alias.version))
        return "" if served is None else served.loaded.namespace


class ServedModels:
    """Loads what the aliases name and tells the native server. ``refresh`` belongs to one thread; reads to any.

    Args:
        registry: where versions lie; None: rows come from the training cluster alone (``live``).
        server: answers lookups.
        options: what and how.
        live: makes the version that has no files, when there is no registry.
        peers_problem: why the other shards' processes are not known; empty: they are, or there is none.
    """

    def __init__(
        self,
        registry: ModelRegistry | None,
        server: _server.Server,
        options: ModelsOptions,
        live: Callable[[str], LoadedVersion] | None = None,
        peers_problem: Callable[[], str] = str,
    ) -> None:
        self._registry = registry
        self._server = server
        self._options = options
        self._live = live
        self._peers_problem = peers_problem
        self._lock = threading.Lock()
        self._moves: dict[tuple[str, str], _Move] = {}  # aliases whose new version has to catch up
        self._successors: dict[str, Served] = {}  # versions without files, of a new cluster, that are not complete yet
        self._unused_problem = ""  # why versions that are used no more are still there
        self._book = _Book()  # replaced whole, so that readers need no lock for long

    def refresh(self) -> None:
        """Looks at the aliases: loads what they name, then points them there, then gives up what none names.

        A version that cannot be loaded leaves its alias where it was; ``problem_of`` says why.
        """
        for model, which in self._options.wanted:
            try:
                self._refresh(model, which)
                self._forget_problem(model, which)
            except Exception as error:  # whatever it is, other models and what is served go on
                self._say_problem(model, which, error)
        try:
            self._give_up_unused()
            self._options.memory.remove_unused(self._options.place)
            self._unused_problem = ""
        except Exception as error:
            if self._unused_problem != _text_of(error):
                log.error("unused versions: %s", _text_of(error), exc_info=_unforeseen(error))
            self._unused_problem = _text_of(error)

    def book(self) -> _Book:
        """What is served now; not to be changed."""
        with self._lock:
            return self._book

    def find(
        self, model: str, which: str, reaches: Callable[[str], bool] = lambda _: True
    ) -> tuple[Alias, dict[int, Served]]:
        """What ``MODEL@which`` names here, and the loaded versions that it needs.

        Args:
            model, which: as they were asked for.
            reaches: whether the caller may know of a namespace.

        Raises:
            NotFound: this process does not serve it (says what it does, of the namespaces that the caller reaches).
        """
        book = self.book()
        if which.isdecimal() and (model, int(which)) in book.versions:
            return Alias(int(which)), {int(which): book.versions[model, int(which)]}
        alias = book.aliases.get((model, which))
        if alias is None:
            known = [key for key, one in sorted(book.aliases.items()) if reaches(book.namespace_of(key[0], one))]
            # The namespace of a model that could not be loaded is not known.
            problem = book.problems.get((model, which)) if reaches("") else None
            served = ", ".join(f"{name}@{named}" for name, named in known) or "nothing yet"
            raise NotFound(f"model {model}@{which}: " + (problem or f"is not served here; served: {served}"))
        return alias, {version: book.versions[model, version] for version in alias.versions}

    @property
    def is_ready(self) -> bool:
        """Whether all that was asked for is served, and complete; with peers, also the keys of other shards."""
        book = self.book()
        return not self._peers_problem() and all(
            (model, which) in book.aliases
            and all(book.versions[model, version].is_ready for version in book.aliases[model, which].versions)
            for model, which in self._options.wanted
        )

    def problems(self) -> dict[str, str]:
        """Why something is not served, by ``MODEL@ALIAS``.

        ``peers`` is there while they are not known, ``unused versions`` while they cannot be removed.
        """
        said = {f"{model}@{which}": problem for (model, which), problem in self.book().problems.items()}
        others = {"peers": self._peers_problem(), "unused versions": self._unused_problem}
        return {**said, **{name: problem for name, problem in others.items() if problem}}

    def close(self) -> None:
        """Ends live sync."""
        for served in (*self.book().versions.values(), *self._successors.values()):
            if served.follower is not None:
                served.follower.close()

    def _refresh(self, model: str, which: str) -> None:
        alias = self._registry.resolve(model, which) if self._registry is not None else Alias(0)
        for version in alias.versions:
            if (model, version) not in self.book().versions:
                self._load(model, version)
            served = self.book().versions[model, version]
            self._keep_following(served)
            if self._registry is not None:
                served.dense_version = newest_number(self._registry.folder(model, version))
        has_moved = self._registry is None and self._follow_new_cluster(model)
        moving = self._moves.get((model, which))
        if moving is not None and moving.alias != alias:
            self._end_move(model, which)
        if self.book().aliases.get((model, which)) == alias and not has_moved:
            return
        if not self._may_move(model, which, alias):
            return
        versions = self.book().versions
        main = versions[model, alias.version]
        canary = None if alias.canary is None else versions[model, alias.canary].loaded.store
        self._server.set_model(
            handle_of(model, which),
            main.loaded.store,
            alias.version,
            canary=canary,
            canary_number=alias.canary or 0,
            canary_share=alias.canary_share,
        )
        self._change(lambda book: book.aliases.update({(model, which): alias}))
        self._end_move(model, which)
        log.info("%s@%s is version %d now", model, which, alias.version)

    def _may_move(self, model: str, which: str, alias: Alias) -> bool:
        """Whether an alias may name its new version now. Where both versions follow training, the former one stands
        still from now on, and the alias waits until the new one has all that was seen of it, so that no row goes back;
        for 10 seconds at most, as training may be away.
        """
        key, versions = (model, which), self.book().versions
        before = self.book().aliases.get(key)
        old = None if before is None else versions.get((model, before.version))
        new = versions[model, alias.version]
        if new.follower is not None:
            new.follower.resume()
        if old is None or old is new or old.follower is None or new.follower is None:
            return True
        if old.loaded.cluster_id != new.loaded.cluster_id:
            return True
        move = self._moves.get(key)
        if move is None:
            old.follower.pause()
            move = self._moves[key] = _Move(alias, old, time.monotonic() + _CATCH_UP_SEC)
        owned = self._options.place.owned(new.loaded.slot_count)
        if old.follower.is_still and bool((new.loaded.slots >= old.loaded.slots)[owned].all()):
            return True
        if time.monotonic() < move.until:
            return False
        log.warning("%s@%s: version %d has not caught up; its rows may be older", model, which, alias.version)
        return True

    def _end_move(self, model: str, which: str) -> None:
        """A version that no alias names any more stays as it is: clients that have not seen the move yet go on to the
        new one, and find nothing older there.
        """
        move = self._moves.pop((model, which), None)
        if move is None:
            return
        version = move.former.loaded.version
        is_named = any(name == model and version in alias.versions for (name, _), alias in self.book().aliases.items())
        is_left = any(other.former is move.former for other in self._moves.values())
        if is_named and not is_left and move.former.follower is not None:
            move.former.follower.resume()

    def _load(self, model: str, version: int) -> None:
        begun = time.monotonic()
        if self._registry is None:
            assert self._live is not None
            loaded = self._live(model)
        else:
            manifest = self._registry.manifest(model, version)
            loaded = load_version(
                self._registry,
                manifest,
                self._options.place,
                memory=self._options.memory,
            )
        self._server.set_model(handle_of(model, version), loaded.store, version)
        self._change(lambda book: book.versions.update({(model, version): Served(loaded)}))
        rows = sum(table.rows for table in loaded.store.stats())
        log.info("%s@%d: %d rows in %.1f s", model, version, rows, time.monotonic() - begun)

    def _follow_new_cluster(self, model: str) -> bool:
        """A version without files goes over to the cluster that came in place of the one that it followed: what it has
        is answered from until the rows of the new one are complete. Whether they are now."""
        successor = self._successors.get(model)
        if successor is None:
            served = self.book().versions[model, 0]
            if served.follower is not None and served.follower.is_superseded:
                assert self._live is not None
                successor = self._successors[model] = Served(self._live(model))
                log.info("%s: goes over to cluster %016x", model, successor.loaded.cluster_id)
        if successor is None:
            return False
        self._keep_following(successor)
        if successor.follower is None or not successor.follower.is_complete:
            return False
        former = self.book().versions[model, 0]
        del self._successors[model]
        self._server.set_model(handle_of(model, 0), successor.loaded.store, 0)
        self._change(lambda book: book.versions.update({(model, 0): successor}))
        if former.follower is not None:
            former.follower.close()
        return True

    def _keep_following(self, served: Served) -> None:
        """Starts live sync where it should be and is not; a cluster that cannot be reached is tried again."""
        follow = self._options.follow
        if follow is None or served.follower is not None:
            return
        try:
            owned = self._options.place.owned(served.loaded.slot_count)
            served.follower = Follower(served.loaded, owned, follow)
            served.problem = ""
        except SparserowError as error:
            if served.problem != str(error):
                log.error("live sync of %s@%d: %s", served.loaded.model, served.loaded.version, error)
            served.problem = str(error)

    def _give_up_unused(self) -> None:
        book = self.book()
        needed = {(model, version) for (model, _), alias in book.aliases.items() for version in alias.versions}
        now = time.monotonic()
        for key, served in book.versions.items():
            if key in needed:
                served.unused_since = None
            elif served.unused_since is None:
                served.unused_since = now
            elif now - served.unused_since > self._options.grace_sec:
                self._server.remove_model(handle_of(*key))
                self._forget_version(*key)
                if served.follower is not None:
                    served.follower.close()
                log.info("%s@%d is given up: no alias names it", *key)

    def _say_problem(self, model: str, which: str, error: Exception) -> None:
        text = _text_of(error)
        if self.book().problems.get((model, which)) != text:
            log.error("%s@%s: %s", model, which, text, exc_info=_unforeseen(error))
        self._change(lambda book: book.problems.update({(model, which): text}))

    def _forget_problem(self, model: str, which: str) -> None:
        self._change(lambda book: book.problems.pop((model, which), None))

    def _forget_version(self, model: str, version: int) -> None:
        self._change(lambda book: book.versions.pop((model, version)))

    def _change(self, change: Callable[[_Book], object]) -> None:
        with self._lock:
            book = _Book(dict(self._book.versions), dict(self._book.aliases), dict(self._book.problems))
            change(book)
            self._book = book


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, SparserowError) else f"{type(error).__name__}: {error}"


def _unforeseen(error: Exception) -> Exception | None:
    """The error where its traceback is of use: it is none of ours."""
    return None if isinstance(error, SparserowError) else error
