"""Run checks one after another, each from a known state and with a deadline; a failure does not stop the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

from tests.conformance.context import Context, LeftOut
from tests.conformance.registry import Check, State
from tests.conformance.stage import Options, Stage
from tests.conformance.wire import Refused

# The longest that one check may take, in seconds.
DEADLINE = 90.0


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    # The node lacks an optional operation.
    UNSUPPORTED = "unsupported"
    # It cannot be checked with this node or these options.
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Result:
    check: Check
    protocol: str
    outcome: Outcome
    # The reason, unless it passed.
    detail: str
    seconds: float


def run_all(checks: Iterable[Check], protocols: Iterable[str], stage: Stage) -> Iterator[Result]:
    """Run every check over every requested protocol that it supports."""
    checks = list(checks)
    for protocol in protocols:
        for check in checks:
            if protocol in check.protocols and fits(check, stage.options):
                yield run_one(check, protocol, stage)


def fits(check: Check, options: Options) -> bool:
    return options.core in check.cores and ((options.local and options.traffic) or not check.local)


def run_one(check: Check, protocol: str, stage: Stage) -> Result:
    begun = time.monotonic()
    outcome, detail = _within(DEADLINE, lambda: _judged(check, protocol, stage))
    return Result(check, protocol, outcome, detail, time.monotonic() - begun)


def _judged(check: Check, protocol: str, stage: Stage) -> tuple[Outcome, str]:
    with closing(Context(stage, protocol, check.state is State.UNCOUNTED)) as context:
        try:
            _prepare(context, check.state)
        except Exception as error:  # noqa: BLE001 - whatever a node does is what is reported
            return Outcome.FAILED, f"its initial state could not be reached: {_text(error)}"
        try:
            check.run(context)
        except LeftOut as why:
            return Outcome.LEFT_OUT, str(why)
        except Exception as error:  # noqa: BLE001 - reported, too
            lacks = check.optional and isinstance(error, Refused) and error.lacking
            return Outcome.UNSUPPORTED if lacks else Outcome.FAILED, _text(error)
    return Outcome.PASSED, ""


def _prepare(context: Context, state: State) -> None:
    if state is State.STOPPED:
        context.stop()
    else:
        context.start(context.member(context.anna))


def _text(error: Exception) -> str:
    """The text of an assertion; of other errors with the type's name."""
    text = str(error)
    return text if text and isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def _within(seconds: float, work: Callable[[], tuple[Outcome, str]]) -> tuple[Outcome, str]:
    """Run the work in a daemon thread, which is abandoned at the deadline."""
    done: list[tuple[Outcome, str]] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else (Outcome.FAILED, f"not done within {seconds:g} s")
