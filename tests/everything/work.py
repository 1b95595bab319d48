"""The concurrent activity of a round: calls of controllers, users' traffic, readers that hang up, harm to cores."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Protocol

from scripts.staging.controller import Controller
from scripts.staging.users import TestUser
from scripts.staging.wait import until
from tests.everything.calls import Calls
from tests.everything.far_end import Flow, Roads
from tests.everything.world import STOP_GRACE, World

# The longest that a call may take, in seconds, whatever happens to cores.
HANG = 25.0
# Threads of users' traffic, and the connections that each keeps.
CARRIERS, KEPT = 3, 6
# Seconds between two connections of the steady user.
BREATH = 0.005
_PAUSES, _HASTY_PAUSES = (0.0, 0.1, 0.5, 1.5), (0.0, 0.02, 0.2)


class Work(Protocol):
    def __call__(self, rng: random.Random, over: float) -> None:
        """Run until this time (monotonic)."""


def at_work(world: World, seed: int) -> None:
    """Run one round. The seed determines the random choices of each thread, not their order between threads."""
    course = world.options.course
    with ExitStack() as stack:
        controllers = [stack.enter_context(closing(each)) for each in world.controllers()]
        works: list[Work] = [_talk(world, each, each is controllers[-1]) for each in controllers]
        works += [_carry(world)] * CARRIERS
        works += [_come_and_go(world)] * course.steady
        works += [_hang_up(world)] * course.hang_ups
        works += [_harm(world)] * bool(course.harms)
        over = time.monotonic() + course.seconds
        with ThreadPoolExecutor(len(works)) as pool:
            done = [pool.submit(work, random.Random(1000 * seed + place), over) for place, work in enumerate(works)]
            for each in done:
                each.result()


def _talk(world: World, controller: Controller, panel: bool) -> Work:
    pauses = _HASTY_PAUSES if world.options.course.hasty else _PAUSES

    def talk(rng: random.Random, over: float) -> None:
        weights = Calls(world, controller, rng, panel).weights
        while time.monotonic() < over:
            (call,) = rng.choices([*weights], [*weights.values()])
            began = time.monotonic()
            try:
                call()
                world.done[call.__name__] += 1
            except Exception as error:  # noqa: BLE001 - refusals are counted, internal errors are faults
                _refused(world, call.__name__, error)
            if (took := time.monotonic() - began) > HANG:
                world.fault(f"FAULT: {call.__name__} took {took:.1f} s")
            time.sleep(rng.choice(pauses))

    return talk


def _refused(world: World, name: str, error: Exception) -> None:
    if "internal error" in str(error).lower():
        world.fault(f"FAULT: {name}: {error}")
    world.refused[f"{name}: {type(error).__name__}: {str(error)[:110]}"] += 1


def _carry(world: World) -> Work:
    def carry(rng: random.Random, over: float) -> None:
        kept: list[Flow] = []
        while time.monotonic() < over:
            if len(kept) < KEPT and rng.random() < 0.6:
                with suppress(OSError):
                    kept.append(_opened(world, rng))
            if kept:
                _move(kept, rng)
            time.sleep(rng.choice([0, 0.01, 0.05]))
        for flow in kept:
            flow.close()

    return carry


def _come_and_go(world: World) -> Work:
    """Short VLESS connections, one after the other."""

    def come_and_go(rng: random.Random, over: float) -> None:
        while time.monotonic() < over:
            with suppress(OSError):
                flow = _opened_by(world, world.steady, Roads.plain)
                try:
                    for _ in range(rng.choice([0, 1, 3])):
                        flow.frame(rng.choice([0, 3000]), rng.choice([1, 3000]))
                finally:
                    flow.close()
                world.done["short connections"] += 1
            time.sleep(BREATH)

    return come_and_go


def _opened(world: World, rng: random.Random) -> Flow:
    """Open a connection of a user who is likely allowed, sometimes of any user. Raises `OSError` if refused."""
    person, places = rng.choice([*world.likely.values()] or [(world.people[0][0], [])])
    if not places or rng.random() < 0.1:
        person, places = rng.choice(world.credentials), list(world.kinds)
    flow = _opened_by(world, person, rng.choice(places))
    world.done["connections"] += 1
    return flow


def _opened_by(world: World, person: TestUser, place: str) -> Flow:
    """Open a connection of this user and have its first byte answered, or raise `OSError`.

    A user opens one at a time: if a user's first two connections to an Xray begin at the same instant, it does not
    count one of them (`stats.GetOrRegisterCounter` looks the counter up and registers it under two locks).
    """
    with world.opening[person.email]:
        flow = world.roads.open(person, place, timeout=2)
        try:
            # A small frame, so that a refused user has hardly sent anything.
            flow.frame(0, 1)
        except OSError:
            world.done["connections refused"] += 1
            flow.close()
            raise
    return flow


def _move(kept: list[Flow], rng: random.Random) -> None:
    """Move bytes over one of the connections, and sometimes close it."""
    flow = rng.choice(kept)
    try:
        flow.frame(rng.choice([0, 100, 30_000]), rng.choice([1, 1000, 100_000]))
    except OSError:
        kept.remove(flow)
        flow.close()
        return
    if rng.random() < 0.2:
        kept.remove(flow)
        flow.close(hard=rng.random() < 0.3)


def _hang_up(world: World) -> Work:
    def hang_up(rng: random.Random, over: float) -> None:
        while time.monotonic() < over:
            with suppress(OSError):
                left = world.bills.leave_early(world.node, rng)
                world.done["readers who hung up" if left else "readers too late to hang up"] += 1
            time.sleep(rng.uniform(0, 0.3))

    return hang_up


def _harm(world: World) -> Work:
    def harm(rng: random.Random, over: float) -> None:
        while time.monotonic() < over:
            time.sleep(rng.uniform(0.3, 2.5))
            if not (pids := world.node.core_pids()):
                continue
            pid, what = rng.choice([pids[-1], pids[-1], pids[0]]), rng.choice(world.options.course.harms)
            if what == "kill":
                _kill(world, pid)
            elif what == "storm":
                _storm(world, rng, over)
            else:
                _stall(world, pid, rng.choice([0.3, 1.5, 4, 7]))
            world.done[what] += 1

    return harm


def _kill(world: World, pid: int) -> None:
    world.bills.kills.append(time.monotonic())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _storm(world: World, rng: random.Random, over: float) -> None:
    """For some seconds kill every core that starts."""
    end = min(over, time.monotonic() + rng.uniform(0.5, 4))
    while time.monotonic() < end:
        for pid in world.node.core_pids()[-1:]:
            _kill(world, pid)
        time.sleep(rng.uniform(0.02, 0.3))


def _stall(world: World, pid: int, seconds: float) -> None:
    """Suspend the core for a time. If the node ended it meanwhile, count it as killed: its last bytes were not read."""
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        ends = _has_term(pid)
        os.kill(pid, signal.SIGCONT)
        if ends:
            with suppress(AssertionError):
                until(lambda: pid not in world.node.core_pids(), STOP_GRACE)
    if pid not in world.node.core_pids():
        world.bills.kills.append(began)


def _has_term(pid: int) -> bool:
    """Whether TERM is pending for a suspended process. Raises `ProcessLookupError` if it has ended."""
    try:
        rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    return bool(int(rows["ShdPnd"], 16) >> (signal.SIGTERM - 1) & 1)
