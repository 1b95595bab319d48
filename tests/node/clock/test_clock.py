"""Jumps of the time of day are reported, once each; corrections are not."""

from __future__ import annotations

from typing import Any, cast

import pytest
from twisted.internet import task

from node.clock.clock import LOOK, REMEMBERED, Clock, ClockOptions
from node.events.journal import Journal
from protos.service_pb2 import Event


class Machine:
    """A machine whose two clocks the test sets."""

    def __init__(self, jump: int = 60) -> None:
        self.reactor = task.Clock()
        self.ahead = 0.0
        self.journal = Journal(cast(Any, self.reactor))
        options = ClockOptions(jump=jump)
        self.clock = Clock(self.reactor, self.journal, options, lambda: self.steady() + self.ahead, self.steady)
        self.clock.start()

    def steady(self) -> float:
        return self.reactor.seconds()

    def jump(self, seconds: float) -> None:
        self.ahead += seconds
        self.reactor.advance(LOOK)

    @property
    def told(self) -> list[str]:
        events = [Event.FromString(packed.body) for packed in self.journal.read(0)]
        return [event.fields["seconds"] for event in events if event.kind == "clock.jumped"]


def test_a_jump_is_reported_once() -> None:
    """Ahead or back; `info` warns for an hour, with what to do."""
    machine = Machine()
    machine.jump(3600)
    machine.reactor.pump([LOOK] * 3)
    assert machine.told == ["3600"]
    [warning] = machine.clock.warnings
    assert warning == "the clock of the machine jumped 3,600 s ahead: check its time synchronization"
    machine.jump(-7200)
    assert machine.told == ["3600", "-7200"]
    machine.reactor.advance(REMEMBERED)
    assert machine.clock.warnings == []
    machine.clock.stop()
    assert machine.reactor.getDelayedCalls() == []


@pytest.mark.parametrize("seconds", [60, -60, 0.5])
def test_a_correction(seconds: float) -> None:
    """A minute is no jump, and a suspended machine is none either: both clocks go on."""
    machine = Machine()
    machine.jump(seconds)
    machine.reactor.advance(36_000)
    assert (machine.told, machine.clock.warnings) == ([], [])


def test_it_may_be_turned_off() -> None:
    machine = Machine(jump=0)
    machine.jump(36_000)
    assert (machine.told, machine.reactor.getDelayedCalls()) == ([], [])
