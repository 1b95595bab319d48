"""The options that all commands have, before a command's name or behind it."""

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
    """What stands behind a command's name goes before what stands in front of it."""
    session = ctx.ensure_object(Session)
    if value not in (None, (), False):
        setattr(session, str(parameter.name), value)


def _keep_names(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    keep(ctx, parameter, tuple(name for name in (value or "").split(",") if name))


def _complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of nodes; several stand behind one another with commas."""
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
    help="Ask these nodes of the file. Without it: the file's default, else the node of this machine.",
)
_ALL = click.option(
    "--all", "all", is_flag=True, callback=keep, expose_value=False, help="Ask all nodes of the file, at once."
)
_JSON = click.option("--json", "json", is_flag=True, callback=keep, expose_value=False, help="Answer in JSON.")
_TIMEOUT = click.option(
    "--timeout",
    type=click.FloatRange(0.1, 3600),
    metavar="SECONDS",
    callback=keep,
    expose_value=False,
    help=f"How long a call may take. [default: {TIMEOUT:g}, more where it has to be]",
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
        help="The file of nodes. [default: txnode/nodes.toml in XDG_CONFIG_HOME; NODECTL_NODES]",
    )


def json_option(function: F) -> F:
    """For commands of this machine alone: `--json`. Their first argument is the session, too."""
    return _JSON(function)


def options(function: F, envvar: str | None = None) -> F:
    """Give a command these options; its first argument is then the session (`click.pass_obj`)."""
    for option in (_TIMEOUT, _JSON, _ALL, _NAMED, _file(envvar)):
        function = option(function)
    return function
