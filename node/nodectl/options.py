"""Options that all commands share, accepted before and after a command's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from node.nodectl.exits import Unusable
from node.nodectl.nodes_file import LOCAL
from node.nodectl.session import TIMEOUT, Session

Function = Callable[..., Any]


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
    help="Call these nodes; local is the one on this machine. [default: the file's default, else local]",
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
