"""What nodectl's exit codes mean, and what to do about an error."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import click

from node import errors
from node.client import NoReply, UnexpectedReply
from node.errors import NodeError
from node.logs import printable


class Exit(IntEnum):
    """How nodectl ends. With several nodes: the code of all, or FAILED where they differ."""

    OK = 0
    # The node refused it, or it went wrong there; of several nodes some did it.
    FAILED = 1
    # The command line, the file of nodes or another file cannot be used. Nothing was asked.
    USAGE = 2
    # There is no answer: no connection, no trust, or not in time.
    UNREACHABLE = 3
    # The key is not the node's, or its scope does not have this.
    KEY_REFUSED = 4
    # No backend is started there, or its core is down.
    NOT_RUNNING = 5
    # The node did it for all users but some.
    USERS_REFUSED = 6
    # `users diff`: the node has other users than the file.
    DIFFERENT = 7
    INTERRUPTED = 130


_CODES: tuple[tuple[type[NodeError], Exit], ...] = (
    (NoReply, Exit.UNREACHABLE),
    (errors.Unauthenticated, Exit.KEY_REFUSED),
    (errors.Forbidden, Exit.KEY_REFUSED),
    (errors.NotInitialized, Exit.NOT_RUNNING),
    (errors.NotStarted, Exit.NOT_RUNNING),
    (errors.CoreFailed, Exit.NOT_RUNNING),
    (errors.UsersRefused, Exit.USERS_REFUSED),
)
_ADVICE: tuple[tuple[type[NodeError], str], ...] = (
    (UnexpectedReply, "look at the port and the transport in the file of nodes"),
    (NoReply, "is the node running, is its port open to here, and is this its certificate?"),
    (errors.Unauthenticated, "give the node's key as key_file in the file of nodes, or as NODECTL_KEY"),
    (errors.Forbidden, "take a key of a wider scope"),
    (errors.NotInitialized, "start a backend first: nodectl start CONFIG"),
    (errors.NotStarted, "the core comes by itself: try again in some seconds"),
    (errors.CoreFailed, "nodectl logs has the core's last words"),
)


class Unusable(click.ClickException):
    """Something that was given cannot be used: nothing was asked of any node."""

    exit_code = Exit.USAGE

    def format_message(self) -> str:
        """Files may be of others, too: nothing in them does something to a terminal."""
        return "\n".join(map(printable, self.message.split("\n")))


def code_of(error: NodeError) -> Exit:
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.FAILED)


def advice_for(error: NodeError) -> str:
    """What to do about it; empty where the error's own text says that."""
    return next((text for kind, text in _ADVICE if isinstance(error, kind)), "")


def together(codes: Iterable[Exit]) -> Exit:
    """The exit code of several nodes."""
    found = set(codes)
    return found.pop() if len(found) == 1 else Exit.FAILED if found else Exit.OK
