"""Options that all commands share, accepted before and after a command's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from node.nodectl.exits import Unusable
from node.nodectl.profiles import LOCAL
from node.nodectl.session import TIMEOUT, Session

F = TypeVar("F", bound=Callable[..., Any])


def keep(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Store an option in the session. Values after a command's name override those before it."""
    session = ctx.ensure_object(Session)
    if value not in (None, (), False):
        setattr(session, str(parameter.name), value)


def _keep_names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    keep(ctx, parameter, tuple(name for name in (value or "").split(",") if name))


def _complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of nodes, also after a comma."""
    before, comma, begun = incomplete.rpartition(",")
    try:
        known = (*ctx.ensure_object(Session).nodes.profiles, LOCAL)
    except Unusable:
        known = (LOCAL,)
    return [CompletionItem(before + comma + name) for name in known if name.startswith(begun)]


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
_ALL = click.option(
    "--all", "all", is_flag=True, callback=keep, expose_value=False, help="Call all nodes of the nodes file."
)
_JSON = click.option("--json", "json", is_flag=True, callback=keep, expose_value=False, help="Print JSON.")
_TIMEOUT = click.option(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    metavar="SECONDS",
    callback=keep,
    expose_value=False,
    help=f"Give up a call after this time. [default: {TIMEOUT:g}, longer for slow commands]",
)


def _file(envvar: str | None) -> Callable[[F], F]:
    return click.option(
        "--nodes",
        "file",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        envvar=envvar,
        callback=keep,
        expose_value=False,
        is_eager=True,
        help="Read nodes from this file. [env: NODECTL_NODES; default: ~/.config/txnode/nodes.toml]",
    )


def json_option(function: F) -> F:
    """Give a command that works on this machine only `--json`; its first argument is the session."""
    return _JSON(function)


def options(function: F, envvar: str | None = None) -> F:
    """Give a command all shared options; its first argument is the session (`click.pass_obj`)."""
    for option in (_TIMEOUT, _JSON, _ALL, _NAMED, _file(envvar)):
        function = option(function)
    return function
