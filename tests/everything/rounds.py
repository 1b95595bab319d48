"""Rounds on one node: all activity at once, then none, then comparisons."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from node.base.errors import NodeError
from protos.service_pb2 import ListUsersRequest, ListUsersResponse
from scripts.staging.controller import Controller, ControllerError, RpcController
from scripts.staging.wait import until
from tests.everything.agreement import differences
from tests.everything.options import Options
from tests.everything.work import at_work
from tests.everything.world import World

# Further seconds in which a difference counts as late, not as a fault: the node audits everything once a minute.
LATE = 100.0
# Seconds until the last bytes are billed, and until the node has freed its resources.
BYTES, REST = 15.0, 15.0
# Characters of a reason to search for in the errors of controllers, which are truncated.
PREFIX = 60
# Allowed growth since the first round: descriptors, threads, MiB.
_GROWTH = (30, 8, 30.0)


class Size(NamedTuple):
    """The node's resources."""

    descriptors: int
    threads: int
    mib: float


def run(options: Options, directory: Path) -> list[str]:
    """Run all rounds on a node in this directory. Returns the faults, each with the seed of its round."""
    with World(options, directory) as world:
        print(f"{options.core}, {options.course}", flush=True)
        with closing(RpcController(world.node)) as controller:
            start(world, controller)
            first: Size | None = None
            for seed in range(options.seed, options.seed + options.rounds):
                found = one_round(world, controller, seed)
                first = first or found
                grown(world, seed, first)
            controller.stop()
            if left := world.node.core_pids():
                world.fault(f"FAULT: after a Stop cores run: {left}")
        for text, count in world.refused.most_common(25):
            print(f"    {count:5} {text}", flush=True)
        return world.faults


def start(world: World, controller: Controller) -> None:
    """Start a core with all inbounds and the user who is always allowed."""
    controller.start(world.backend(random.Random(0), [world.always()], whole=True))


def start_again(world: World, controller: Controller) -> None:
    """Repeat a Start that failed with nothing running before: the node does not retry it."""
    info = controller.info()
    if info.state == "failed" and any(info.reason[:PREFIX] in text for text in world.refused):
        world.done["starts after one that failed"] += 1
        start(world, controller)


def one_round(world: World, controller: Controller, seed: int) -> Size:
    """Run one round and its comparisons. Prints what was done; adds faults to `world.faults`."""
    before, begin = len(world.faults), len(world.node.lines)
    if controller.info().state == "stopped":
        start(world, controller)
    at_work(world, seed)
    start_again(world, controller)
    agree(world, controller)
    balance(world, controller)
    tracebacks(world, begin)
    found = size(world)
    print(f"round with seed {seed}: {dict(world.done)}", flush=True)
    print(f"  {world.bills.summary()}; kills {len(world.bills.kills)}; {found}", flush=True)
    if world.faults[before:]:
        options = world.options
        again = f"--core {options.core} --course {options.course.name} --seed {seed} --rounds 1"
        world.fault(f"the round with seed {seed} failed; to repeat it: python -m tests.everything {again}")
        for line, count in complaints(world, begin).items():
            print(f"    {count:5} {line}", flush=True)
    return found


def agree(world: World, controller: Controller) -> None:
    """Wait until nothing differs. A difference that disappears late is reported as late, any other as a fault."""
    began, patience = time.monotonic(), world.options.course.patience
    if not (wrong := _differ(world, controller, patience)):
        return
    left = _differ(world, controller, LATE)
    word = "FAULT" if left else f"LATE ({time.monotonic() - began:.0f} s)"
    for text in left or wrong:
        world.fault(f"{word}: {text}")


def _differ(world: World, controller: Controller, seconds: float) -> list[str]:
    """Wait until nothing differs. Returns the remaining differences after so many seconds."""
    wrong: list[str] = []

    def agrees() -> bool:
        try:
            wrong[:] = differences(world, controller)
        except (ControllerError, NodeError, AssertionError, OSError) as error:
            wrong[:] = [f"{type(error).__name__}: {error}"]
        return not wrong

    with suppress(AssertionError):
        until(agrees, seconds)
    return wrong


def balance(world: World, controller: Controller) -> None:
    """Bill all users until the bills match the bytes moved."""
    wrong: list[str] = []

    def billed() -> bool:
        world.bills.take(controller)
        wrong[:] = world.bills.faults()
        return not wrong

    try:
        until(billed, BYTES)
    except AssertionError as error:
        if error.__cause__:  # of a call
            raise
    for text in wrong:
        world.fault(f"FAULT: {text}")
    world.bills.forgive(foreseen=not wrong)
    if world.options.course.apart:
        rows = controller.call("ListUsers", ListUsersResponse, ListUsersRequest(traffic=True)).users
        for text in world.bills.unlike(rows):
            world.fault(f"FAULT: {text}")


def tracebacks(world: World, begin: int) -> None:
    """Report the first traceback in the node's log since this line."""
    lines = world.node.lines
    for place in range(begin, len(lines)):
        if "Traceback" in lines[place] or "Unhandled" in lines[place]:
            world.fault("FAULT: the log has: " + " | ".join(lines[max(begin, place - 3) : place + 70]))
            return


def complaints(world: World, begin: int) -> Counter[str]:
    """The warnings and errors in the node's log since this line, without their times, and how often each came."""
    said = (line.partition(" ")[2] for line in world.node.lines[begin:])
    return Counter(line for line in said if any(f"#{level}]" in line for level in ("warn", "error", "critical")))


def size(world: World) -> Size:
    process = psutil.Process(world.node.node_pid)
    with process.oneshot():
        return Size(process.num_fds(), process.num_threads(), round(process.memory_info().rss / 2**20, 1))


def grown(world: World, seed: int, first: Size) -> None:
    """Report if the node takes much more than after the first round, for longer than `REST`."""
    try:
        until(lambda: not _more(first, size(world)), REST)
    except AssertionError:
        if more := _more(first, now := size(world)):
            world.fault(f"FAULT: after the round with seed {seed} the node has {more} more: {now}, and had {first}")


def _more(first: Size, now: Size) -> list[str]:
    """The names of the resources that grew by more than allowed."""
    rows = zip(Size._fields, first, now, _GROWTH, strict=True)
    return [name for name, earlier, later, allowed in rows if later > earlier + allowed]
