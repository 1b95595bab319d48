"""A core's executable on this machine: where it is, which version, and how it is run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from twisted.internet.threads import deferToThreadPool

from drivers.install.install import find
from drivers.install.releases import Core, InstallError
from drivers.process import memory
from drivers.process.child import CoreProcess
from drivers.process.confinement import Confinement, Touched, unconfined
from drivers.process.paths import Paths
from drivers.process.settings import ADOPT, CORE_MEMORY, executable_setting
from drivers.process.spawn import Done, Spawner, by_setpriv, opened
from node.contract.driver import Host
from node.errors import CoreFailed
from protos.handover_pb2 import Answer, Common, File, Installed

# Clean: nothing of the node's own reaches a core, its key least of all.
ENVIRONMENT = {
    "PATH": os.defpath,
    "TZ": "UTC",
    # Else listeners are MPTCP, and cannot be handed over to a next generation.
    "GODEBUG": "multipathtcp=0",
}

# Asks an executable something.
Look = Callable[[], Awaitable[Done]]
# What operators are told of each file that is another one by now.
CHANGED = "{} changed on disk; it is used when the core starts next"
# … and of each that the core looks for again, and cannot read.
REPLACED = "{} was replaced, and the core cannot read the new one before it starts next: it may find no host's name"


@dataclass(frozen=True)
class Executable:
    """One executable file as it is now: `number` is its version to be compared, `lines` all that it says of itself."""

    path: Path
    spawner: Spawner
    changed: int | None = None
    version: str = ""
    number: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    confinement: Confinement = field(default_factory=Confinement)

    def touching(self, touched: Touched) -> Executable:
        """The same one, which can touch what a configuration names and no more."""
        rules = self.confinement.rules(self.path, touched)
        return replace(self, spawner=replace(self.spawner, rules=rules))

    @cached_property
    def unconfined(self) -> str | None:
        """Why it can touch all that the node can, for an operator; None if it cannot. Looked up once: see `changed`."""
        return unconfined(self.path)

    async def run(self, *arguments: str, stdin: bytes = b"", output: int = 3) -> Done:
        """Have it do something that ends by itself: see `Spawner.run`."""
        return await self.spawner.run([str(self.path), *arguments], stdin=stdin, output=output)

    def reading(self, paths: Iterable[Path] = ()) -> Files:
        """What a core of it reads when it starts, these among it, and what it cannot read again."""
        return Files([self.path, *paths], self.confinement.pinned() if self.unconfined is None else ())

    def reads_another(self, path: Path) -> bool:
        """Whether a core of it can read a file that takes this one's name while it runs."""
        return self.unconfined is not None or self.confinement.covers(path)

    def start(self, core: CoreProcess, *arguments: str, contents: Mapping[int, bytes]) -> None:
        """Have it run as a core, which reads these contents from its descriptors. Raises `CoreFailed`."""
        with ExitStack() as files:
            descriptors = {number: opened(content, files) for number, content in contents.items()}
            self.spawner.spawn(core, [str(self.path), *arguments], descriptors)


class Files:
    """Files as they are now, to be looked at again. `pinned` may be written, but not be replaced."""

    def __init__(self, paths: Iterable[Path], pinned: Iterable[Path] = ()) -> None:
        self._marks = {path: _mark(path) for path in sorted(paths)}
        self._pinned = {path: _node(path) for path in sorted(pinned)}

    @property
    def packed(self) -> list[File]:
        """For the next program of the node."""
        read = [File(path=str(path), mark=mark or ()) for path, mark in self._marks.items()]
        return read + [File(path=str(path), mark=node or (), pinned=True) for path, node in self._pinned.items()]

    @classmethod
    def unpacked(cls, files: Iterable[File]) -> Files:
        """As an earlier program of the node saw them."""
        found = cls(())
        for file in files:
            (found._pinned if file.pinned else found._marks)[Path(file.path)] = cast(Any, tuple(file.mark) or None)
        return found

    def changed(self) -> list[Path]:
        """Those that were replaced, written or removed since."""
        return [path for path, mark in self._marks.items() if _mark(path) != mark]

    def replaced(self) -> list[Path]:
        """The pinned ones that are others by now."""
        return [path for path, node in self._pinned.items() if _node(path) not in (node, None)]

    @property
    def warnings(self) -> list[str]:
        """All of that for an operator."""
        return [*map(CHANGED.format, self.changed()), *map(REPLACED.format, self.replaced())]


def _node(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass
class Installation:
    """Finds a core's executable once, and asks for its version again when the file changes.

    One that was chosen goes before all that is found; what was made for another one runs that one on.
    """

    host: Host
    core: Core
    environment: Callable[[Path], Mapping[str, str]] = lambda _: ENVIRONMENT
    oldest: tuple[int, ...] = ()
    # What it reads beside its configuration.
    assets: Callable[[Path], Collection[Path]] = lambda _: ()
    # By what was chosen; None for what is found.
    _known: dict[Path | None, Executable] = field(default_factory=dict)
    # Of those that an earlier program of the node has found: there may be others by now.
    _stale: set[Path | None] = field(default_factory=set)
    # What it answered to an earlier program, and what it answers to this one for the next, if that is kept.
    _answers: Mapping[bytes, bytes] = field(default_factory=dict)
    _kept: dict[bytes, bytes] | None = None

    @property
    def _variable(self) -> str:
        return executable_setting(self.core).name

    @property
    def paths(self) -> Paths:
        """What configurations may name."""
        return Paths.of(self.host)

    @property
    def unconfined(self) -> str | None:
        """Why the core can touch all that the node can, once it is known."""
        known = self._known.get(self.chosen)
        return known.unconfined if known else None

    @property
    def chosen(self) -> Path | None:
        """The executable to run now, if one was chosen."""
        return self.host.choices.executables.get(self.core.name)

    async def version(self) -> str:
        """Of the executable to run now. Raises as `current`."""
        chosen = self.chosen
        known = None if chosen in self._stale else self._known.get(chosen)
        if known is None or not known.path.is_file() or known.changed != known.path.stat().st_mtime_ns:
            known = await self.current(chosen)
        return known.version

    async def current(self, chosen: Path | None) -> Executable:
        """The executable to run for what is made, or was, while this one was chosen.

        Raises `CoreFailed` with what to do if there is none.
        """
        known = None if chosen in self._stale else self._known.get(chosen)
        if known is None or not known.path.is_file():
            known = await self._found(chosen)
            self._stale.discard(chosen)
        most = memory.allowed(self.host.settings.get(CORE_MEMORY.name, ""))
        lives_on = self.host.settings.get(ADOPT.name) == "on"
        spawner = replace(known.spawner, environment=self.environment(known.path), data=most, lives_on=lives_on)
        confinement = Confinement(self.paths, self.host.directory, self.assets(known.path))
        known = replace(known, spawner=spawner, confinement=confinement).touching(Touched())
        changed = known.path.stat().st_mtime_ns
        if known.changed != changed:
            known = replace(await self._asked(known), changed=changed)
        self._known[chosen] = known
        return known

    async def answered(self, executable: Executable, asked: str, text: bytes, look: Look) -> bytes:
        """What the executable makes of this text; an earlier program may have asked. Raises what `look` raises."""
        question = hashlib.sha256(f"{executable.path} {executable.changed} {asked}\n".encode() + text).digest()
        output = self._answers.get(question)
        output = (await look()).output if output is None else output
        if self._kept is not None:
            self._kept[question] = output
        return output

    def keep(self, kept: bool) -> None:
        """Keep what is answered from here on for the next program of the node, or no more."""
        self._kept = {} if kept else None

    @property
    def packed(self) -> Common:
        """What the next program would ask."""
        answers = [Answer(asked=asked, output=output) for asked, output in (self._kept or {}).items()]
        return Common(answers=answers, installed=(self._left(*each) for each in self._known.items()))

    def _left(self, chosen: Path | None, known: Executable) -> Installed:
        return Installed(
            path=str(known.path),
            chosen=str(chosen or ""),
            configured=self._configured,
            setpriv=known.spawner.setpriv or "",
            changed=known.changed or 0,
            version=known.version,
            number=known.number,
            lines=known.lines,
        )

    def go_on(self, left: Common) -> None:
        """Believe what an earlier program knew, until it is told to `look_again`."""
        self._answers = {answer.asked: answer.output for answer in left.answers}
        for each in left.installed:
            number = tuple(each.number)
            if each.configured == self._configured and number >= self.oldest:
                spawner = Spawner(self.host.reactor, self.host.directory, ENVIRONMENT, each.setpriv or None)
                found = Executable(Path(each.path), spawner, each.changed, each.version, number, tuple(each.lines))
                self._known[Path(each.chosen) if each.chosen else None] = found

    def look_again(self) -> None:
        """There may be others by now, and they may have other answers."""
        self._stale = set(self._known)
        self._answers = {}

    @property
    def _configured(self) -> str:
        return self.host.settings.get(self._variable, "")

    async def _found(self, chosen: Path | None) -> Executable:
        """Chosen, configured, on PATH or installed; it is looked for off the reactor's back."""
        reactor, configured = self.host.reactor, self.host.settings.get(self._variable) or None
        try:
            if chosen is not None and chosen.is_file():
                path: Path | None = chosen
            else:
                path = await deferToThreadPool(reactor, reactor.getThreadPool(), find, self.core, configured)
        except InstallError as error:
            raise CoreFailed(str(error)) from error
        if path is None:
            how = f"run `python -m drivers.install {self.core.name}`"
            raise CoreFailed(f"there is no {self.core.title} on this machine: {how}")
        return Executable(path, await by_setpriv(Spawner(reactor, self.host.directory, ENVIRONMENT)))

    async def _asked(self, bare: Executable) -> Executable:
        """With its version."""
        lines = (await bare.run("version")).lines
        # The leash before it, or the core itself, may have complained about something.
        match = next(filter(None, map(self.core.banner.match, lines)), None)
        if match is None:
            what = f"does not say which {self.core.title} it is"
            raise CoreFailed(f"{bare.path} {what}; set {self._variable} to one that works")
        version, number = "".join(match.groups()), tuple(map(int, match[1].split(".")))
        if number < self.oldest:
            what = f"is {self.core.title} {version}, and the node needs {'.'.join(map(str, self.oldest))} or newer"
            raise CoreFailed(f"{bare.path} {what}; set {self._variable} to one")
        return replace(bare, version=version, number=number, lines=lines)
