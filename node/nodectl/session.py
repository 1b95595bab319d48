"""A command's session: which nodes to call, and how to print their answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console

from node.base.errors import NodeError
from node.base.reactor import Reactor
from node.client import Target
from node.nodectl import profiles
from node.nodectl.exits import Exit, Unusable, code_of, together
from node.nodectl.local_node import LocalNode, find
from node.nodectl.local_profile import local
from node.nodectl.output import Row, print_error, print_json, print_table
from node.nodectl.profiles import LOCAL, Nodes, Profile
from node.nodectl.running import Fleet, Node, Outcome, Work, ask, attempt, each, run
from node.nodectl.targets import target_of

T = TypeVar("T")
# Default timeout of a call, in seconds.
TIMEOUT = 15.0


def default_file() -> Path:
    """The default path of the nodes file."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "txnode" / "nodes.toml"


@dataclass
class Session:
    """The options shared by all commands, and the calls that they make."""

    file: Path | None = None
    named: tuple[str, ...] = ()
    all: bool = False
    json: bool = False
    timeout: float | None = None

    @property
    def nodes(self) -> Nodes:
        """The nodes in the nodes file. Raises `Unusable`."""
        return profiles.read(self.file or default_file(), needed=self.file is not None)

    @property
    def local_node(self) -> LocalNode:
        """The node on this machine. Raises `Unusable`."""
        try:
            return find(Path.cwd(), os.environ)
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"the settings of the node on this machine cannot be read: {error}")

    def targets(self) -> dict[str, Target]:
        """The nodes to call, by name. Raises `Unusable`."""
        return {profile.name: target_of(profile, os.environ) for profile in self._chosen()}

    def ask(self, work: Work[T], timeout: float | None = None) -> list[Outcome[T]]:
        """Do this work with all chosen nodes in parallel. `timeout`: the command's default, in seconds."""
        targets, deadline = self.targets(), self.timeout or timeout or TIMEOUT
        names = ", ".join(targets)
        console = Console(stderr=True)
        with console.status(f"waiting for {names}") if console.is_terminal and not self.json else nullcontext():
            return run(lambda reactor: ask(reactor, targets, work, deadline))

    def stream(self, work: Work[None]) -> NoReturn:
        """Have `work` print what comes from all chosen nodes, until it ends; errors are printed as they come."""

        async def reported(node: Node) -> NodeError | None:
            outcome = await attempt(node, work)
            if outcome.error is not None:
                print_error(node.name, outcome.error)
            return outcome.error

        ended = self.attend(lambda fleet: fleet.ask(reported, len(fleet.nodes)))
        raise click.exceptions.Exit(together(code_of(one.answer) if one.answer else Exit.OK for one in ended))

    def attend(self, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        """Run work that calls the chosen nodes many times."""
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
        """Print all answers, as rows of one table, and all errors; exit with the errors' code, else with `code`."""
        if self.json:
            print_json([document(outcome) for outcome in outcomes])
        elif answers := each(outcomes):
            self.table(columns, [(node, row) for node, answer in answers for row in rows(answer)], len(outcomes) > 1)
        self.end(outcomes, code)

    def table(self, columns: Sequence[str], rows: Iterable[tuple[str, Row]], many: bool) -> None:
        """Print a table of nodes' answers; with `many`, the first column names the node."""
        if many:
            print_table(["node", *columns], [[node, *row] for node, row in rows])
        else:
            print_table(columns, [row for _, row in rows])

    def end(self, outcomes: Sequence[Outcome[Any]], code: Exit = Exit.OK) -> NoReturn:
        """Print the errors, and exit with their code; without errors with `code`."""
        for outcome in outcomes:
            if outcome.error is not None:
                print_error(outcome.node, outcome.error)
        raise click.exceptions.Exit(
            together(code if outcome.error is None else code_of(outcome.error) for outcome in outcomes)
        )

    def _chosen(self) -> list[Profile]:
        nodes = self.nodes
        if self.all and self.named:
            raise click.UsageError("give --all or --node, not both")
        if self.all and not nodes.profiles:
            raise Unusable(f"--all: the nodes file {self.file or default_file()} has no nodes; see docs/nodectl.md")
        names = tuple(nodes.profiles) if self.all else self.named or nodes.default or (LOCAL,)
        return [self._profile(nodes, name) for name in dict.fromkeys(names)]

    def _profile(self, nodes: Nodes, name: str) -> Profile:
        if name in nodes.profiles:
            return nodes.profiles[name]
        if name == LOCAL:
            return local(Path.cwd(), os.environ)
        known = ", ".join(nodes.profiles) or "no nodes"
        raise Unusable(f"the nodes file {self.file or default_file()} has no node {name}: it has {known}")


def document(outcome: Outcome[Any]) -> dict[str, Any]:
    if outcome.error is not None:
        return {"node": outcome.node, "error": {"code": outcome.error.code, "text": outcome.error.text}}
    return {"node": outcome.node, "result": outcome.answer}
