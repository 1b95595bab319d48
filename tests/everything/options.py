"""Options of a run: its core, seed, and what may happen in its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.staging.core import find_xray
from scripts.staging.sing_box import find_sing_box
from tests.harness.grounds import SING_BOX, XRAY, Ground

# The inbounds by tag: VLESS, Shadowsocks-2022, and classic Shadowsocks.
PLACES: Mapping[str, str] = {
    "home": "vless-raw",
    "work": "shadowsocks-2022-aes-128",
    "old": "shadowsocks-aes-256-gcm",
}
# An unused UDP inbound, with which the takeover by another core takes longer.
IDLE = "idle"

Executables = Mapping[Ground, Path]
CORES: Mapping[str, Callable[[], Executables]] = {
    "xray": lambda: {XRAY: find_xray()},
    "sing-box": lambda: {SING_BOX: find_sing_box("built")},
    "sing-box-without-counters": lambda: {SING_BOX: find_sing_box("wheel")},
    "in-turn": lambda: {XRAY: find_xray(), SING_BOX: find_sing_box("built")},
}
"""The cores to run on; with the last one every Start takes one of two cores, on the same ports."""


@dataclass(frozen=True)
class Course:
    """What may happen in a round.

    `harms` are drawn at random, repeated ones more often: `kill`, `stall`, `storm` (kills every core that starts, for
    some seconds). With `hang_ups` a reader of counters leaves before its reply. `hasty` controllers hardly pause. With
    `small` the node treats any number of users as many: in its thread pool, and in slices. `drains` is
    DRAIN_GENERATIONS. `idle` adds the UDP inbound. `steady` threads connect without a pause as a user who is always
    allowed, so that every core has connections from its first moment to its last. `apart` counts users' bytes by
    inbound, and weighs them. After `seconds` of work everything must agree within `patience` seconds.
    """

    name: str
    seconds: float = 12.0
    harms: tuple[str, ...] = ()
    hang_ups: bool = False
    hasty: bool = False
    small: bool = False
    drains: int = 4
    idle: bool = False
    steady: int = 0
    apart: bool = False
    patience: float = 25.0


_HARMS = ("kill", "kill", "storm", "stall")
_COURSES = (
    Course("harmed", harms=_HARMS, hang_ups=True),
    Course("in-parts", harms=_HARMS, hang_ups=True, small=True),
    Course("calm", hang_ups=True, hasty=True, steady=1),
    Course("exact", hasty=True, idle=True, steady=2),
    Course("crowded", drains=1, steady=1),
    Course("apart", hasty=True, idle=True, steady=2, apart=True),
)
COURSES: Mapping[str, Course] = {course.name: course for course in _COURSES}


@dataclass(frozen=True)
class Options:
    """One run: the core's name in `CORES`, the seed of the first round (later ones follow), and the course."""

    core: str
    seed: int
    rounds: int
    course: Course
