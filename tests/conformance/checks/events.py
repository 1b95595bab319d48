"""Checks of events."""

from __future__ import annotations

from functools import partial

from tests.conformance import registry
from tests.conformance.context import Context
from tests.conformance.registry import Level

check = partial(registry.check, "events")


@check("events.resumed", Level.BEYOND, optional=True)
def resumed(context: Context) -> None:
    """Numbers rise; a stream resumed after a number has exactly the events after it."""
    context.stop()
    context.start()
    every = context.node.events()
    numbers = [event.sequence for event in every]
    assert numbers == sorted(set(numbers)), numbers
    assert {"backend.stopped", "backend.running"} <= {event.kind for event in every}
    middle = every[len(every) // 2]
    following = context.node.events(middle.sequence, middle.epoch)
    assert following[: len(every) - len(every) // 2 - 1] == every[len(every) // 2 + 1 :]


@check("events.lost", Level.BEYOND, optional=True)
def lost(context: Context) -> None:
    """A stream with a number of another epoch begins with `events.lost`, then has all kept events."""
    every = context.node.events()
    first, *others = context.node.events(every[-1].sequence, "another")
    assert first.kind == "events.lost", first
    assert others[: len(every)] == every
