"""The versions that a serving process answers from: loads, follows, swaps and unloads them as aliases move."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..cpp_ext import _server
from ..proto.errors import NotFound, SparserowError
from ..proto.published.dense import newest_number
from ..proto.published.model_names import handle_of, is_version
from ..proto.published.registry import Alias, ModelRegistry
from ..proto.security.security import process_security
from .client.shard_assignment import ShardAssignment
from .failed_loads import FailedLoads, text_of
from .follow_options import FollowOptions
from .live_sync import Follower
from .loaded_version import LoadedVersion, load_version
from .row_memory import RowMemory

log = logging.getLogger(__name__)

_CATCH_UP_SEC = 10.0  # how long an alias waits for its new version to catch up with training


@dataclass
class Served:
    """A loaded version with its live sync.

    Attributes:
        loaded: the version.
        follower: its live sync; None: it does not follow training.
        problem: the reason why it does not follow although it should; "": there is none.
        unused_since: the time since which no alias names it, in monotonic seconds; None while an alias names it.
        dense_version: the number of the newest dense weights published for it; 0: there are none.
    """

    loaded: LoadedVersion
    follower: Follower | None = None
    problem: str = ""
    unused_since: float | None = None
    dense_version: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether the version has all rows of this process's slots."""
        if self.loaded.version > 0:
            return True
        return self.follower is not None and self.follower.is_complete


@dataclass(frozen=True)
class ModelsOptions:
    """The models that a process serves, and the options of serving them.

    Args:
        wanted: pairs of a model and an alias or version.
        place: the shard and replica of this process.
        follow: the options of live sync; None: versions stay as they were published.
        memory: the storage for the rows of each version.
        poll_sec: the pause between two checks of the aliases, in seconds.
        grace_sec: how long a version that no alias names still answers, in seconds.
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
        alias: the alias with its new version.
        former: the version that it still names; its live sync is paused.
        until: the time after which the alias moves in any case, in monotonic seconds.
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
        """Returns the namespace whose rows an alias serves; "" while it is not known."""
        served = self.versions.get((model, alias.version))
        return "" if served is None else served.loaded.namespace


class ServedModels:
    """Loads the versions that the aliases name and gives them to the native server.

    Only one thread calls ``refresh``; any thread may call the other methods.

    Args:
        registry: the registry of versions; None: rows come only from the training cluster, by ``live``.
        server: the native server, which answers lookups.
        options: the models to serve, and how.
        live: makes a version without files; it is needed when there is no registry.
        peers_problem: returns the reason why the other shards' processes were not found; "": they were found, or there
            are none.
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
        self._named: dict[tuple[str, str], Alias] = {}  # what each alias named when it was last looked up
        self._failed = FailedLoads()
        self._moves: dict[tuple[str, str], _Move] = {}  # aliases whose new version must catch up first
        self._successors: dict[str, Served] = {}  # versions without files, of a new cluster, that are not complete yet
        self._unused_problem = ""  # the reason why unused versions could not be removed
        self._book = _Book()  # replaced whole, so that readers need no lock for long

    def refresh(self) -> None:
        """Reads the aliases, loads the versions that they name, moves them, and unloads versions that no alias names.

        When a version cannot be loaded, its alias stays where it was; :meth:`problems` has the reason. It is tried
        again at growing pauses, of a minute at most, and at once when its files or an alias of the model change.
        """
        for model, which in self._options.wanted:
            try:
                self._refresh(model, which)
                self._forget_problem(model, which)
            except Exception as error:  # whatever it is, other models and loaded versions go on
                self._say_problem(model, which, error)
        self._name_aliases()
        try:
            self._give_up_unused()
            self._options.memory.remove_unused(self._options.place)
            self._unused_problem = ""
        except Exception as error:
            if self._unused_problem != text_of(error):
                log.error("unused versions: %s", text_of(error), exc_info=_unforeseen(error))
            self._unused_problem = text_of(error)

    def book(self) -> _Book:
        """Returns the versions and aliases that are served now; the caller must not change it."""
        with self._lock:
            return self._book

    def find(
        self, model: str, which: str, reaches: Callable[[str], bool] = lambda _: True
    ) -> tuple[Alias, dict[int, Served]]:
        """Finds the versions that ``MODEL@which`` names.

        Args:
            model: the name of the model.
            which: an alias, or the number of a version.
            reaches: returns whether the caller may know of a namespace.

        Returns:
            The alias, and its loaded versions by number.

        Raises:
            NotFound: this process does not serve it; the text lists the models of namespaces that the caller reaches.
        """
        book = self.book()
        if is_version(which) and (model, int(which)) in book.versions:
            return Alias(int(which)), {int(which): book.versions[model, int(which)]}
        alias = book.aliases.get((model, which))
        if alias is None:
            known = [key for key, one in sorted(book.aliases.items()) if reaches(book.namespace_of(key[0], one))]
            # The namespace of a model that could not be loaded is not known.
            problem = book.problems.get((model, which)) if reaches("") else None
            served = ", ".join(f"{name}@{named}" for name, named in known) or "nothing yet"
            raise NotFound(f"model {model}@{which}: " + (problem or f"it is not served here; served: {served}"))
        return alias, {version: book.versions[model, version] for version in alias.versions}

    @property
    def is_ready(self) -> bool:
        """Whether all wanted models are served and complete; with peers, whether these were found as well."""
        book = self.book()
        return not self._peers_problem() and all(
            (model, which) in book.aliases
            and all(book.versions[model, version].is_ready for version in book.aliases[model, which].versions)
            for model, which in self._options.wanted
        )

    def problems(self) -> dict[str, str]:
        """Returns the reasons why models are not served, by ``MODEL@ALIAS``.

        Two more keys are possible: "peers" while they were not found, and "unused versions" while these cannot be
        removed.
        """
        said = {f"{model}@{which}": problem for (model, which), problem in self.book().problems.items()}
        others = {"peers": self._peers_problem(), "unused versions": self._unused_problem}
        return {**said, **{name: problem for name, problem in others.items() if problem}}

    def sync_problems(self) -> dict[str, str]:
        """Returns the reasons why versions, or tables of them, do not follow now, by ``MODEL@VERSION``."""
        found = {}
        for (model, version), served in self.book().versions.items():
            problem = served.problem or ("" if served.follower is None else served.follower.problem)
            if problem:
                found[f"{model}@{version}"] = problem
        return found

    def close(self) -> None:
        """Ends live sync."""
        for served in (*self.book().versions.values(), *self._successors.values()):
            if served.follower is not None:
                served.follower.close()

    def _refresh(self, model: str, which: str) -> None:
        alias = self._registry.resolve(model, which) if self._registry is not None else Alias(0)
        if self._named.get((model, which)) != alias:
            self._named[model, which] = alias
            self._failed.forget(model)
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
        """Returns whether an alias may name its new version now.

        When both versions follow training, the live sync of the former one is paused. The alias waits until the new
        version has every change that the former one has, so that no row goes back to an older state. It waits at most
        10 seconds, as training may be away.
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
        """Ends the move of an alias, and resumes live sync of the former version if an alias still names it.

        Otherwise that version stays paused. Clients that have not seen the move yet then find nothing older when they
        go on to the new version.
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
            with self._failed.trying(model, version, self._registry.folder(model, version)):
                manifest = self._registry.trusted_manifest(model, version, process_security())
                loaded = load_version(self._registry, manifest, self._options.place, memory=self._options.memory)
        self._server.set_model(handle_of(model, version), loaded.store, version)
        self._change(lambda book: book.versions.update({(model, version): Served(loaded)}))
        rows = sum(table.rows for table in loaded.store.stats())
        log.info("%s@%d: %d rows in %.1f s", model, version, rows, time.monotonic() - begun)

    def _follow_new_cluster(self, model: str) -> bool:
        """Moves a version without files to a new cluster that has replaced the one that it followed.

        The rows of the former cluster answer until those of the new one are complete.

        Returns:
            Whether the version has moved to the new cluster in this call.
        """
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
        """Starts live sync of a version if it should follow and does not; a failure is recorded and tried again."""
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

    def _name_aliases(self) -> None:
        """Lets each version that follows know the aliases that name it, for the status of the training cluster."""
        book = self.book()
        for (model, version), served in book.versions.items():
            if served.follower is not None:
                named = sorted((which, one) for (name, which), one in book.aliases.items() if name == model)
                served.follower.name_aliases(
                    which if one.version == version else f"{which} ({one.canary_share:.0%} canary)"
                    for which, one in named
                    if version in one.versions and not is_version(which)
                )

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
                log.info("%s@%d is unloaded: no alias names it", *key)

    def _say_problem(self, model: str, which: str, error: Exception) -> None:
        text = text_of(error)
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


def _unforeseen(error: Exception) -> Exception | None:
    """Returns the error if its traceback should be logged, because it is not one of the taxonomy; else None."""
    return None if isinstance(error, SparserowError) else error
