"""A command's session: which nodes to call, and how to print their answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console

from node.base.reactor import Reactor
from node.client import Target
from node.nodectl import nodes_file
from node.nodectl.exits import Exit, Unusable, code_of, together
from node.nodectl.fleet import Fleet, Outcome, Work, answers
from node.nodectl.local_node import LocalNode, find, local_target
from node.nodectl.nodes_file import LOCAL, Nodes, with_secrets
from node.nodectl.output import Row, print_error, print_json, print_table
from node.nodectl.run import run

T = TypeVar("T")
# Default timeout of a call, in seconds.
TIMEOUT = 15.0


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
        return nodes_file.read(self._file, needed=self.file is not None)

    @property
    def local_node(self) -> LocalNode:
        """The node on this machine. Raises `Unusable`."""
        try:
            return find(Path.cwd(), os.environ)
        except (OSError, UnicodeDecodeError) as error:
            raise Unusable(f"the settings of the node on this machine cannot be read: {error}")

    def targets(self) -> dict[str, Target]:
        """The nodes to call, by name. Raises `Unusable`."""
        nodes = self.nodes
        if self.all and self.named:
            raise click.UsageError("give --all or --node, not both")
        if self.all and not nodes.targets:
            raise Unusable(f"--all: the nodes file {self._file} has no nodes; see docs/nodectl.md")
        names = tuple(nodes.targets) if self.all else self.named or nodes.default or (LOCAL,)
        chosen = {name: self._target(nodes, name) for name in names}
        return {name: with_secrets(name, target, os.environ) for name, target in chosen.items()}

    def ask(self, work: Work[T], timeout: float | None = None) -> list[Outcome[T]]:
        """Do this work with all chosen nodes in parallel. `timeout`: the command's default, in seconds."""
        targets, console = self.targets(), Console(stderr=True)
        waiting = console.status(f"waiting for {', '.join(targets)}")
        with waiting if console.is_terminal and not self.json else nullcontext():
            return self._call(targets, lambda fleet: fleet.ask(work), timeout)

    def attend(self, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
        """Run work that calls the chosen nodes many times."""
        return self._call(self.targets(), work)

    def report(
        self,
        outcomes: Sequence[Outcome[T]],
        columns: Sequence[str],
        rows: Callable[[T], Iterable[Row]],
        code: Exit = Exit.OK,
    ) -> NoReturn:
        """Print all answers, as rows of one table, and all errors; exit with the errors' code, else with `code`.

        With several nodes, the first column names the node.
        """
        if self.json:
            print_json([outcome.document for outcome in outcomes])
        elif answered := answers(outcomes):
            named = len(outcomes) > 1
            lines = [(node, *row) if named else row for node, answer in answered for row in rows(answer)]
            print_table(("node", *columns) if named else columns, lines)
        for outcome in outcomes:
            if outcome.error is not None:
                print_error(outcome.node, outcome.error)
        raise click.exceptions.Exit(
            together(code if outcome.error is None else code_of(outcome.error) for outcome in outcomes)
        )

    @property
    def _file(self) -> Path:
        home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
        return self.file or Path(home) / "txnode" / "nodes.toml"

    def _call(
        self,
        targets: Mapping[str, Target],
        work: Callable[[Fleet], Coroutine[Any, Any, T]],
        timeout: float | None = None,
    ) -> T:
        async def main(reactor: Reactor) -> T:
            async with Fleet(reactor, targets, self.timeout or timeout or TIMEOUT) as fleet:
                return await work(fleet)

        return run(main)

    def _target(self, nodes: Nodes, name: str) -> Target:
        if name in nodes.targets:
            return nodes.targets[name]
        if name == LOCAL:
            return local_target(Path.cwd(), os.environ)
        known = ", ".join(nodes.targets) or "no nodes"
        raise Unusable(f"the nodes file {self._file} has no node {name}: it has {known}")
