"""Checks of the log stream, which clients keep open for hours."""

from __future__ import annotations

from functools import partial

from scripts.staging.echo import EchoServer
from tests.conformance import registry
from tests.conformance.context import Context
from tests.conformance.registry import Level, State
from tests.conformance.wire import Lines

check = partial(registry.check, "logs")

# Seconds that a stream must stay open.
WATCHED = 0.5


def stays(stream: Lines) -> None:
    """Assert that the stream stays open for `WATCHED` seconds; a node that ends streams does so at once."""
    assert not stream.ends(WATCHED), f"the node ended the stream: {stream.over}"


@check("logs.without-backend", Level.CONTROLLERS, state=State.STOPPED)
def without_backend(context: Context) -> None:
    """The log stream stays open without a core: old clients would reconnect at once, in a busy loop."""
    with context.node.logs() as stream:
        stays(stream)


def line_of(context: Context, stream: Lines) -> str:
    """The core's line about a new connection, to a port that was not used before."""
    context.need_traffic()
    with EchoServer(context.stage.options.echo) as somewhere:
        context.comes_in(context.anna, to=somewhere)
        target = f":{somewhere.port}"
        line: str = context.soon(lambda: next((line for line in stream.lines if target in line), ""), "a line")
    return line


@check("logs.lines", Level.CONTROLLERS)
def lines(context: Context) -> None:
    """Lines of the core arrive while the stream is open."""
    with context.node.logs() as stream:
        line_of(context, stream)


@check("logs.never-ended", Level.CONTROLLERS)
def never_ended(context: Context) -> None:
    """Neither Stop nor Start ends the log stream: old gRPC clients would reconnect in a busy loop."""
    with context.node.logs() as stream:
        stays(stream)
        context.stop()
        stays(stream)
        context.start()
        stays(stream)


@check("logs.same-stream", Level.BEYOND, state=State.STOPPED)
def same_stream(context: Context) -> None:
    """A stream that was opened before a Start has the lines of the new core."""
    with context.node.logs() as stream:
        context.start(context.member(context.anna))
        line_of(context, stream)


@check("logs.bare", Level.CONTROLLERS, ["rest"])
def bare(context: Context) -> None:
    """With `x-api-key` lines are bare, without `data:`."""
    with context.node.logs() as stream:
        line = line_of(context, stream)
    assert not line.startswith(("data:", "event:")), line
    assert not [line for line in stream.lines if line.startswith(":")], "the stream has comments of Server-Sent Events"
