"""nodectl's exit codes, and advice for errors."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import click

from node.base import errors
from node.base.errors import NodeError
from node.base.logs import printable
from node.client import NoReply, UnexpectedReply


class Exit(IntEnum):
    """Exit codes of nodectl. With several nodes: the code of all, or FAILED if they differ."""

    OK = 0
    # The node refused the call or failed; or several nodes had different results.
    FAILED = 1
    # The command line, the nodes file or another file cannot be used. No node was called.
    USAGE = 2
    # No reply: no connection, an untrusted certificate, or a timeout.
    UNREACHABLE = 3
    # The node does not know the key, or its scope is too small.
    KEY_REFUSED = 4
    # No backend was started on the node, or its core is down.
    NOT_RUNNING = 5
    # Done, except for some users.
    USERS_REFUSED = 6
    # `users diff`: the users of the node and of the file differ.
    DIFFERENT = 7
    INTERRUPTED = 130


# Errors of calls, with their exit codes and what to do about them; empty where the error's own text says that.
_ERRORS: tuple[tuple[type[NodeError], Exit, str], ...] = (
    (UnexpectedReply, Exit.UNREACHABLE, "check port and transport in the nodes file"),
    (
        NoReply,
        Exit.UNREACHABLE,
        "check that the node runs, that its port is reachable, and that the certificate is this node's",
    ),
    (
        errors.Unauthenticated,
        Exit.KEY_REFUSED,
        "give the node's key as key_file in the nodes file, or in NODECTL_KEY",
    ),
    (errors.Forbidden, Exit.KEY_REFUSED, "use a key with a wider scope"),
    (errors.NotInitialized, Exit.NOT_RUNNING, "start the core first: nodectl start CONFIG"),
    (errors.NotStarted, Exit.NOT_RUNNING, "the node is starting the core: try again in a few seconds"),
    (errors.CoreFailed, Exit.NOT_RUNNING, "for the core's last lines: nodectl logs"),
    (errors.UsersRefused, Exit.USERS_REFUSED, ""),
    (NodeError, Exit.FAILED, ""),
)


class Unusable(click.ClickException):
    """An argument or a file cannot be used; no node was called."""

    exit_code = Exit.USAGE

    def format_message(self) -> str:
        """Escape control characters: files may come from others."""
        return "\n".join(map(printable, self.message.split("\n")))


def code_of(error: NodeError) -> Exit:
    return next(code for kind, code, _ in _ERRORS if isinstance(error, kind))


def advice_for(error: NodeError) -> str:
    """Advice on an error; empty where its own text has it."""
    return next(advice for kind, _, advice in _ERRORS if isinstance(error, kind))


def together(codes: Iterable[Exit]) -> Exit:
    """The exit code of several nodes."""
    found = set(codes)
    return found.pop() if len(found) == 1 else Exit.FAILED if found else Exit.OK
