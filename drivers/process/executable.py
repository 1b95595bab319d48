"""Find a core's executable on this machine, ask for its version, and run it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from drivers.install.install import find
from drivers.install.releases import Core, InstallError
from drivers.process.child import CoreProcess
from drivers.process.confinement import NO_LANDLOCK, Confinement, Touched, unconfined
from drivers.process.paths import Paths
from drivers.process.settings import CORE_MEMORY, memory_limit
from drivers.process.spawn import Spawner, in_memory
from node.base.errors import CoreFailed
from node.base.pool import in_pool
from node.contract.driver import Done, Host
from protos.handover_pb2 import Answer, Common, File, Installed

# The whole environment of a core: nothing of the node's own environment is in it, least of all its key.
ENVIRONMENT = {
    "PATH": os.defpath,
    "TZ": "UTC",
    # Otherwise listeners use Multipath TCP, and cannot be shared with the next core.
    "GODEBUG": "multipathtcp=0",
}

# Runs an executable on a question, such as a configuration to convert.
Look = Callable[[], Awaitable[Done]]
# The warning for each file that has changed since the core started, …
CHANGED = "{} changed on disk; the core uses it from its next start on"
# … and for each that the core reads again by name, and cannot since it was replaced.
REPLACED = "{} was replaced; the core cannot read the new one until it restarts, and may fail to resolve host names"
OTHER_SETTINGS = "{} has changed; the core has it from its next start on"
# Stands before the name of a setting, in place of the path of a file.
_SETTING = "?"


@dataclass(frozen=True)
class Executable:
    """One executable file as it is now. `number`: its version, for comparison. `lines`: the output of `version`."""

    path: Path
    spawner: Spawner
    changed: int | None = None
    version: str = ""
    number: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    confinement: Confinement = field(default_factory=Confinement)

    def touching(self, touched: Touched) -> Executable:
        """Return a copy that is confined to what a configuration names."""
        rules = self.confinement.rules(self.path, touched)
        return replace(self, spawner=replace(self.spawner, rules=rules))

    @cached_property
    def unconfined(self) -> str | None:
        """Why the core is not confined, for an operator; None if it is. Looked up once: see `changed`."""
        return unconfined(self.path)

    async def run(self, *arguments: str, stdin: bytes = b"", output: int = 3) -> Done:
        """Run a command of the executable to its end: see `Spawner.run`."""
        return await self.spawner.run([str(self.path), *arguments], stdin=stdin, output=output)

    def reading(self, paths: Iterable[Path] = ()) -> Files:
        """Return the files that a core reads at its start, with `paths`, and those that it cannot read again."""
        return Files([self.path, *paths], self.confinement.pinned() if self.unconfined is None else ())

    def reads_another(self, path: Path) -> bool:
        """Whether a running core can read a file that replaces this one."""
        return self.unconfined is not None or self.confinement.covers(path)

    def start(self, core: CoreProcess, *arguments: str, contents: Mapping[int, bytes]) -> None:
        """Start a core, which reads these contents from its descriptors. Raises `CoreFailed`."""
        with ExitStack() as files:
            descriptors = {number: in_memory(content, files) for number, content in contents.items()}
            self.spawner.spawn(core, [str(self.path), *arguments], descriptors)


class Files:
    """Remembers files as they are now, to notice changes. `pinned` ones may change in place, but not be replaced.

    And the settings that the core has, each by a number: see `under`.
    """

    def __init__(self, paths: Iterable[Path], pinned: Iterable[Path] = ()) -> None:
        # None until they are known; a recovered core may have none.
        self._settings: Mapping[str, int] | None = None
        self._settings_now: Mapping[str, int] = {}
        self._marks = {path: _mark(path) for path in sorted(paths)}
        self._pinned = {path: _mark(path, pinned=True) for path in sorted(pinned)}

    @property
    def packed(self) -> list[File]:
        """The state for the next node process."""
        read = [File(path=str(path), mark=mark or ()) for path, mark in self._marks.items()]
        read += [File(path=str(path), mark=node or (), pinned=True) for path, node in self._pinned.items()]
        return read + [File(path=_SETTING + name, mark=[one]) for name, one in (self._settings or {}).items() if one]

    @classmethod
    def unpacked(cls, files: Iterable[File]) -> Files:
        """Restore the state of a previous node process."""
        found = cls(())
        found._settings = {file.path[1:]: file.mark[0] for file in files if file.path.startswith(_SETTING)}
        for file in files:
            if file.path.startswith(_SETTING):
                continue
            (found._pinned if file.pinned else found._marks)[Path(file.path)] = tuple(file.mark) or None
        return found

    def under(self, settings: Mapping[str, int]) -> None:
        """These are the settings now, by name, 0 for those that do nothing; a core that was not recovered has them."""
        self._settings_now = settings
        if self._settings is None:
            self._settings = settings

    @property
    def changed_settings(self) -> list[str]:
        """The names of settings that the core does not have as they are now."""
        has, now = self._settings or {}, self._settings_now
        return [name for name in now if has.get(name, 0) != now[name]]

    def changed(self) -> list[Path]:
        """Return the files that were replaced, written or removed since."""
        return [path for path, mark in self._marks.items() if _mark(path) != mark]

    def replaced(self) -> list[Path]:
        """Return the pinned files that were replaced."""
        return [path for path, node in self._pinned.items() if _mark(path, pinned=True) not in (node, None)]

    @property
    def warnings(self) -> list[str]:
        """A warning for each changed or replaced file."""
        settings = map(OTHER_SETTINGS.format, self.changed_settings)
        return [*map(CHANGED.format, self.changed()), *map(REPLACED.format, self.replaced()), *settings]


def _mark(path: Path, pinned: bool = False) -> tuple[int, ...] | None:
    """Return a value that changes with a file or, if it is pinned, when it is replaced; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if pinned else (found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass
class Installation:
    """Finds a core's executable once, and asks for its version again when the file changes.

    An executable that an update has chosen takes precedence. A plan keeps the executable that was chosen when the plan
    was made.
    """

    host: Host
    core: Core
    environment: Callable[[Path], Mapping[str, str]] = lambda _: ENVIRONMENT
    oldest: tuple[int, ...] = ()
    # The directories of geo files that the core reads.
    assets: Callable[[Path], Collection[Path]] = lambda _: ()
    # By the chosen path; None where none was chosen.
    _known: dict[Path | None, Executable] = field(default_factory=dict)
    # Entries from a previous node process, which are to be looked up again.
    _stale: set[Path | None] = field(default_factory=set)
    # Answers that a previous node process left, and, if kept, those for the next one.
    _answers: Mapping[bytes, bytes] = field(default_factory=dict)
    _kept: dict[bytes, bytes] | None = None

    @property
    def _variable(self) -> str:
        return self.core.variable("EXECUTABLE_PATH")

    @property
    def paths(self) -> Paths:
        """The files that configurations may name."""
        return Paths.of(self.host)

    @property
    def unconfined(self) -> str | None:
        """Why this executable is not confined where the kernel could do it, once that is known; None if it is."""
        known = self._known.get(self.chosen)
        return known.unconfined if known and known.unconfined != NO_LANDLOCK else None

    @property
    def chosen(self) -> Path | None:
        """The executable that an update has chosen, if any."""
        return self.host.choices.executables.get(self.core.name)

    async def version(self) -> str:
        """Return the version of the executable to run now. Raises as `current`."""
        chosen = self.chosen
        known = None if chosen in self._stale else self._known.get(chosen)
        if known is None or not known.path.is_file() or known.changed != known.path.stat().st_mtime_ns:
            known = await self.current(chosen)
        return known.version

    async def current(self, chosen: Path | None) -> Executable:
        """Return the executable to run for plans that were made while `chosen` was chosen.

        Raises `CoreFailed`, with what to do, if it is missing.
        """
        known = None if chosen in self._stale else self._known.get(chosen)
        if known is None or not known.path.is_file():
            known = await self._found(chosen)
            self._stale.discard(chosen)
        most = memory_limit(self.host.settings.get(CORE_MEMORY.name, ""))
        keeper = self.host.keeper if self.host.keeper.lasts else None
        spawner = replace(known.spawner, environment=self.environment(known.path), data=most, keeper=keeper)
        confinement = Confinement(self.paths, self.host.directory, self.assets(known.path))
        known = replace(known, spawner=spawner, confinement=confinement).touching(Touched())
        changed = known.path.stat().st_mtime_ns
        if known.changed != changed:
            known = replace(await self._asked(known), changed=changed)
        self._known[chosen] = known
        return known

    async def answered(self, executable: Executable, asked: str, text: bytes, look: Look) -> bytes:
        """Return the output of `look` for this text, or the cached one of a previous node process. Raises as `look`."""
        question = hashlib.sha256(f"{executable.path} {executable.changed} {asked}\n".encode() + text).digest()
        output = self._answers.get(question)
        output = (await look()).output if output is None else output
        if self._kept is not None:
            self._kept[question] = output
        return output

    def keep(self, kept: bool) -> None:
        """Begin or end to keep answers for the next node process."""
        self._kept = {} if kept else None

    @property
    def packed(self) -> Common:
        """Facts about the executable, so that the next node process need not run it for them."""
        answers = [Answer(asked=asked, output=output) for asked, output in (self._kept or {}).items()]
        return Common(answers=answers, installed=(self._left(*each) for each in self._known.items()))

    def _left(self, chosen: Path | None, known: Executable) -> Installed:
        return Installed(
            path=str(known.path),
            chosen=str(chosen or ""),
            configured=self._configured,
            changed=known.changed or 0,
            version=known.version,
            number=known.number,
            lines=known.lines,
        )

    def go_on(self, left: Common) -> None:
        """Use what a previous node process knew, until `look_again` is called."""
        self._answers = {answer.asked: answer.output for answer in left.answers}
        for each in left.installed:
            number = tuple(each.number)
            if each.configured == self._configured and number >= self.oldest:
                found = replace(self._bare(Path(each.path)), changed=each.changed, version=each.version)
                found = replace(found, number=number, lines=tuple(each.lines))
                self._known[Path(each.chosen) if each.chosen else None] = found

    def look_again(self) -> None:
        """Forget what a previous node process knew: executables may have changed since."""
        self._stale = set(self._known)
        self._answers = {}

    @property
    def _configured(self) -> str:
        return self.host.settings.get(self._variable, "")

    async def _found(self, chosen: Path | None) -> Executable:
        """Find the executable in the reactor's thread pool: chosen, configured, on PATH or installed."""
        reactor, configured = self.host.reactor, self.host.settings.get(self._variable) or None
        try:
            if chosen is not None and chosen.is_file():
                path: Path | None = chosen
            else:
                path = await in_pool(reactor, find, self.core, configured)
        except InstallError as error:
            raise CoreFailed(str(error)) from error
        if path is None:
            how = f"install it with `nodectl core install {self.core.name}`"
            raise CoreFailed(f"there is no {self.core.title} on this machine: {how}")
        return self._bare(path)

    def _bare(self, path: Path) -> Executable:
        return Executable(path, Spawner(self.host.reactor, self.host.directory, ENVIRONMENT))

    async def _asked(self, bare: Executable) -> Executable:
        """Return the executable with its version. Raises `CoreFailed` if it is none or too old."""
        lines = (await bare.run("version")).lines
        # The leash or the core may have printed warnings before it.
        match = next(filter(None, map(self.core.banner.match, lines)), None)
        if match is None:
            what = f"does not print a version of {self.core.title}"
            raise CoreFailed(f"{bare.path} {what}; set {self._variable} to an executable that does")
        version, number = "".join(match.groups()), tuple(map(int, match[1].split(".")))
        if number < self.oldest:
            what = f"is {self.core.title} {version}, but the node needs {'.'.join(map(str, self.oldest))} or newer"
            raise CoreFailed(f"{bare.path} {what}; set {self._variable} to a newer one")
        return replace(bare, version=version, number=number, lines=lines)
