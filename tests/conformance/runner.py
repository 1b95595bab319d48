"""Runs checks one after another: each from a known state, each with a deadline, and none hides another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

from tests.conformance.context import Context
from tests.conformance.registry import Check, State
from tests.conformance.stage import Options, Stage
from tests.conformance.wire import Refused

# Seconds that one check may take.
DEADLINE = 90.0


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    # The node lacks an operation that is optional.
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Result:
    check: Check
    protocol: str
    outcome: Outcome
    # Why it failed, in words.
    detail: str
    seconds: float


def run_all(checks: Iterable[Check], protocols: Iterable[str], stage: Stage) -> Iterator[Result]:
    """Every check over every protocol that it is for and that is asked for."""
    checks = list(checks)
    for protocol in protocols:
        for check in checks:
            if protocol in check.protocols and fits(check, stage.options):
                yield run_one(check, protocol, stage)


def fits(check: Check, options: Options) -> bool:
    return options.core in check.cores and (options.local or not check.local)


def run_one(check: Check, protocol: str, stage: Stage) -> Result:
    begun = time.monotonic()
    outcome, detail = _within(DEADLINE, lambda: _judged(check, protocol, stage))
    return Result(check, protocol, outcome, detail, time.monotonic() - begun)


def _judged(check: Check, protocol: str, stage: Stage) -> tuple[Outcome, str]:
    with closing(Context(stage, protocol, check.state is State.UNCOUNTED)) as context:
        try:
            _prepare(context, check.state)
        except Exception as error:  # noqa: BLE001 - whatever a node does is what is reported
            return Outcome.FAILED, f"it could not begin: {_told(error)}"
        try:
            check.run(context)
        except Exception as error:  # noqa: BLE001 - so it is here
            lacks = check.optional and isinstance(error, Refused) and error.lacking
            return Outcome.UNSUPPORTED if lacks else Outcome.FAILED, _told(error)
    return Outcome.PASSED, ""


def _prepare(context: Context, state: State) -> None:
    if state is State.STOPPED:
        context.stop()
    else:
        context.start(context.member(context.anna))


def _told(error: Exception) -> str:
    """An assertion has words of its own."""
    words = str(error)
    return words if words and isinstance(error, AssertionError) else f"{type(error).__name__}: {words}"


def _within(seconds: float, work: Callable[[], tuple[Outcome, str]]) -> tuple[Outcome, str]:
    """A check that hangs is left behind; its thread does not keep the program."""
    done: list[tuple[Outcome, str]] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else (Outcome.FAILED, f"not done within {seconds:g} s")
