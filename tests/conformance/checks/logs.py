"""The log stream, which clients keep open for hours."""

from __future__ import annotations

from functools import partial

from scripts.staging.echo import EchoServer
from tests.conformance import registry
from tests.conformance.context import Context
from tests.conformance.registry import Level, State
from tests.conformance.wire import Lines

check = partial(registry.check, "logs")

# Seconds in which a stream that is to stay open is watched.
WATCHED = 0.5


def stays(stream: Lines) -> None:
    """It is open after a while: what ends a stream does it at once."""
    assert not stream.ends(WATCHED), f"the node ended the stream: {stream.over}"


@check("logs.without-backend", Level.CONTROLLERS, state=State.STOPPED)
def without_backend(context: Context) -> None:
    """The log stream is held open where no core runs: old clients ask again at once, without end."""
    with context.node.logs() as stream:
        stays(stream)


def line_of(context: Context, stream: Lines) -> str:
    """The core's line about a connection of now, to a port that nobody went to before."""
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
    """The node does not end the log stream, not at a Stop and not at a Start: old gRPC clients would spin."""
    with context.node.logs() as stream:
        stays(stream)
        context.stop()
        stays(stream)
        context.start()
        stays(stream)


@check("logs.same-stream", Level.BEYOND, state=State.STOPPED)
def same_stream(context: Context) -> None:
    """A stream that was opened before a Start has the lines of the core that it brings."""
    with context.node.logs() as stream:
        context.start(context.member(context.anna))
        line_of(context, stream)


@check("logs.bare", Level.CONTROLLERS, ["rest"])
def bare(context: Context) -> None:
    """With `x-api-key` lines come bare, without `data:` before them."""
    with context.node.logs() as stream:
        line = line_of(context, stream)
    assert not line.startswith(("data:", "event:")), line
    assert not [line for line in stream.lines if line.startswith(":")], "there are comments of Server-Sent Events"
