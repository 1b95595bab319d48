"""A command's session: the options that all commands share, the nodes to call, and how to print their answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem
from rich.console import Console

from node.client import Target
from node.nodectl import nodes_file
from node.nodectl.fleet import Fleet, Outcome, Work, answers, call, run
from node.nodectl.local_node import SERVICE_SETTINGS, LocalNode, find, instance, local_target
from node.nodectl.nodes_file import LOCAL, Nodes, with_secrets
from node.nodectl.output import Exit, Row, Unusable, code_of, print_error, print_json, print_table, together

T = TypeVar("T")
Function = Callable[..., Any]
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
    def instance(self) -> LocalNode | None:
        """The instance of the unit node@.service that `--node` names, if it names only that. Raises `Unusable`."""
        name = self.named[0] if len(self.named) == 1 and self.named[0] not in self.nodes.targets else ""
        return instance(name)

    @property
    def local_node(self) -> LocalNode:
        """The node on this machine: the instance, else that of the directory, else the service. Raises `Unusable`."""
        try:
            return self.instance or find(Path.cwd(), os.environ)
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
        when: Callable[[T], bool] = lambda _: True,
    ) -> NoReturn:
        """Print all answers, as rows of one table, and all errors; with several nodes, the first column names the node.

        Exits with the errors' code, else with `code` if `when` holds for an answer.
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
        answered_with = code if any(when(answer) for _, answer in answers(outcomes)) else Exit.OK
        raise click.exceptions.Exit(
            together(answered_with if outcome.error is None else code_of(outcome.error) for outcome in outcomes)
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
        return run(partial(call, targets, self.timeout or timeout or TIMEOUT, work))

    def _target(self, nodes: Nodes, name: str) -> Target:
        if name in nodes.targets:
            return nodes.targets[name]
        if name == LOCAL or instance(name) is not None:
            return local_target(Path.cwd(), os.environ, name)
        known, here = ", ".join(nodes.targets) or "no nodes", SERVICE_SETTINGS.with_name(f"{name}.env")
        raise Unusable(f"the nodes file {self._file} has no node {name}: it has {known}. {here} cannot be read, either")


def _keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Store an option in the session. Values after a command's name override those before it."""
    session = ctx.ensure_object(Session)
    if value not in (None, (), False):
        setattr(session, str(parameter.name), value)


def _keep_names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    _keep(ctx, parameter, tuple(name for name in (value or "").split(",") if name))


def _complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of nodes, also after a comma."""
    before, comma, begun = incomplete.rpartition(",")
    try:
        known = (*ctx.ensure_object(Session).nodes.targets, LOCAL)
    except Unusable:
        known = (LOCAL,)
    return [CompletionItem(before + comma + name) for name in known if name.startswith(begun)]


_kept = partial(click.option, callback=_keep, expose_value=False)
_NAMED = click.option(
    "--node",
    "named",
    metavar="NAME[,NAME]",
    callback=_keep_names,
    expose_value=False,
    is_eager=True,
    shell_complete=_complete,
    help="Call these nodes: of the nodes file, or units node@NAME, or local. [default: the file's default, else local]",
)
_ALL = _kept("--all", "all", is_flag=True, help="Call all nodes of the nodes file.")
_JSON = _kept("--json", "json", is_flag=True, help="Print JSON.")
_TIMEOUT = _kept(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    metavar="SECONDS",
    help=f"Give up a call after this time. [default: {TIMEOUT:g}, longer for slow commands]",
)
_file = partial(
    _kept,
    "--nodes",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    is_eager=True,
    help="Read nodes from this file. [env: NODECTL_NODES; default: ~/.config/txnode/nodes.toml]",
)


def shared(function: Function, envvar: str | None = None) -> Function:
    """Give a group all shared options; `envvar` may name the nodes file."""
    for option in (_TIMEOUT, _JSON, _ALL, _NAMED, _file(envvar=envvar)):
        function = option(function)
    return function


def options(function: Function) -> Function:
    """Give a command that calls nodes all shared options, and the session as its first argument."""
    return shared(click.pass_obj(function))


def json_option(function: Function) -> Function:
    """Give a command that works on this machine only `--json`, and the session as its first argument."""
    return _JSON(click.pass_obj(function))


# Each command has its own help for it.
inbound_option = partial(click.option, "--inbound", "inbounds", multiple=True, metavar="TAG")
