"""What a command has of its command line: which nodes to ask, and how to say their answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console

from node.client import Target
from node.errors import NodeError
from node.nodectl import profiles
from node.nodectl.exits import Exit, Unusable, code_of, together
from node.nodectl.here import Here, here
from node.nodectl.local import local
from node.nodectl.output import Row, say_error, say_json, say_table
from node.nodectl.profiles import LOCAL, Nodes, Profile
from node.nodectl.running import Asked, Fleet, Outcome, Work, ask, asked, each, run
from node.nodectl.targets import target_of
from node.reactor import Reactor

T = TypeVar("T")
# Seconds that a call may take where the command line says nothing.
TIMEOUT = 15.0


def default_file() -> Path:
    """Where the file of nodes is if nobody says another place."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "txnode" / "nodes.toml"


@dataclass
class Session:
    """The options that all commands have, and the work that all have to do."""

    file: Path | None = None
    named: tuple[str, ...] = ()
    all: bool = False
    json: bool = False
    timeout: float | None = None

    @property
    def nodes(self) -> Nodes:
        """The file of nodes. Raises `Unusable`."""
        return profiles.read(self.file or default_file(), needed=self.file is not None)

    @property
    def here(self) -> Here:
        """The node of this machine. Raises `Unusable`."""
        try:
            return here(Path.cwd(), os.environ)
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"the settings of this machine's node cannot be read: {error}")

    def targets(self) -> dict[str, Target]:
        """The nodes to ask, by name. Raises `Unusable`."""
        return {profile.name: target_of(profile, os.environ) for profile in self._chosen()}

    def ask(self, work: Work[T], timeout: float | None = None) -> list[Outcome[T]]:
        """Ask all chosen nodes at once. `timeout`: seconds, for commands that may take longer, if none are said."""
        targets, deadline = self.targets(), self.timeout or timeout or TIMEOUT
        names = ", ".join(targets)
        console = Console(stderr=True)
        with console.status(f"asking {names}") if console.is_terminal and not self.json else nullcontext():
            return run(lambda reactor: ask(reactor, targets, work, deadline))

    def stream(self, work: Work[None]) -> NoReturn:
        """Have work say what comes of all chosen nodes at once, to its end; errors are said as they come, too."""

        async def told(node: Asked) -> NodeError | None:
            outcome = await asked(node, work)
            if outcome.error is not None:
                say_error(node.name, outcome.error)
            return outcome.error

        ended = self.attend(lambda fleet: fleet.ask(told, len(fleet.nodes)))
        raise click.exceptions.Exit(together(code_of(one.answer) if one.answer else Exit.OK for one in ended))

    def attend(self, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        """For commands that go on until they are ended."""
        targets = self.targets()

        async def main(reactor: Reactor) -> T:
            async with Fleet(reactor, targets, self.timeout or TIMEOUT) as fleet:
                return await work(fleet)

        return run(main)

    def report(
        self,
        outcomes: Sequence[Outcome[T]],
        columns: Sequence[str],
        rows: Callable[[T], Iterable[Row]],
        code: Exit = Exit.OK,
    ) -> NoReturn:
        """Say all answers, as rows of one table, and all errors; then end with the code of it, without any `code`."""
        if self.json:
            say_json([document(outcome) for outcome in outcomes])
        elif answers := each(outcomes):
            self.table(columns, [(node, row) for node, answer in answers for row in rows(answer)], len(outcomes) > 1)
        self.end(outcomes, code)

    def table(self, columns: Sequence[str], rows: Iterable[tuple[str, Row]], many: bool) -> None:
        """A table of what nodes answered; with many, their names stand in front."""
        if many:
            say_table(["node", *columns], [[node, *row] for node, row in rows])
        else:
            say_table(columns, [row for _, row in rows])

    def end(self, outcomes: Sequence[Outcome[Any]], code: Exit = Exit.OK) -> NoReturn:
        """Say the errors, and end with the code of them all; without any with `code`."""
        for outcome in outcomes:
            if outcome.error is not None:
                say_error(outcome.node, outcome.error)
        raise click.exceptions.Exit(
            together(code if outcome.error is None else code_of(outcome.error) for outcome in outcomes)
        )

    def _chosen(self) -> list[Profile]:
        nodes = self.nodes
        if self.all and self.named:
            raise click.UsageError("say --all or --node, not both")
        if self.all and not nodes.profiles:
            raise Unusable(f"--all: {self.file or default_file()} has no nodes; docs/nodectl.md says how it is written")
        names = tuple(nodes.profiles) if self.all else self.named or nodes.default or (LOCAL,)
        return [self._profile(nodes, name) for name in dict.fromkeys(names)]

    def _profile(self, nodes: Nodes, name: str) -> Profile:
        if name in nodes.profiles:
            return nodes.profiles[name]
        if name == LOCAL:
            return local(Path.cwd(), os.environ)
        known = ", ".join(nodes.profiles) or "no node"
        raise Unusable(f"{self.file or default_file()} has no node {name}: it has {known}")


def document(outcome: Outcome[Any]) -> dict[str, Any]:
    if outcome.error is not None:
        return {"node": outcome.node, "error": {"code": outcome.error.code, "text": outcome.error.text}}
    return {"node": outcome.node, "result": outcome.answer}
