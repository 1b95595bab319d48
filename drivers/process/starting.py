"""Start-up of a core: build its configuration, wait until it answers, and explain why it does not."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from drivers.process.aliases import unaliased
from drivers.process.child import PANIC, CoreProcess
from node.base.errors import CoreFailed, InvalidConfig, PortTaken
from node.base.pool import in_pool
from node.base.reactor import PooledReactor
from node.contract.accounts import Accounts
from node.contract.driver import Done, fatal_lines

T = TypeVar("T")

# With more users than this a configuration is built in the reactor's thread pool.
BUILD_INLINE = 5000
# A controller's text that is longer than this is parsed there.
READ_INLINE = 64 * 1024
# Seconds between two checks of a core that is starting.
POLL = 0.002
# Seconds that one request to it may take.
CALL = 1.0
# The number of lines of the core in an error.
LAST_LINES = 5
# Words of errors that blame the machine, not the configuration.
_OF_THE_MACHINE = (
    "cannot allocate memory",
    "too many open files",
    "no space left on device",
    "resource temporarily unavailable",
    "input/output error",
)


async def built(reactor: PooledReactor, target: Mapping[str, Accounts], build: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `build`, run in the reactor's thread pool if there are many users."""
    return await _aside(reactor, sum(map(len, target.values())) > BUILD_INLINE, build, *arguments)


async def read(reactor: PooledReactor, text: str, reading: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `reading`, run in the reactor's thread pool if the text that it parses is long.

    Raises `InvalidConfig` for a text that is nested too deeply for Python.
    """
    try:
        return await _aside(reactor, len(text) > READ_INLINE, reading, *arguments)
    except RecursionError as error:
        raise InvalidConfig("the configuration is nested too deeply") from error


async def _aside(reactor: PooledReactor, dear: bool, work: Callable[..., T], *arguments: Any) -> T:
    if not dear:
        return work(*arguments)
    return await in_pool(reactor, work, *arguments)


async def ready(
    reactor: IReactorTime,
    core: CoreProcess,
    answers: Callable[[], Awaitable[bool]],
    seconds: float,
    is_refusal: Callable[[CoreProcess], bool],
    cause: Callable[[Sequence[str]], str],
) -> None:
    """Wait until the core answers. Kills it if it does not in time, or if the caller cancels.

    `is_refusal` decides whether a core that exited refused its configuration, `cause` extracts why. Raises `CoreFailed`
    with the last lines, `PortTaken` or `InvalidConfig`.
    """
    deadline = reactor.seconds() + seconds
    try:
        while core.exit is None:
            if reactor.seconds() > deadline:
                raise CoreFailed(f"the core did not answer within {seconds:g} s{_why(core, cause)}")
            if await answers():
                return
            await deferLater(reactor, POLL)
        if is_refusal(core) and not of_the_machine(cause(core.last_lines)):
            raise refused(cause(_sayable(core)))
        if any("address already in use" in line for line in core.last_lines):
            raise PortTaken(f"the core could not bind a port{_why(core, cause)}")
        raise CoreFailed(f"the core did not start ({core.exit.how}){_why(core, cause)}")
    except BaseException:
        await core.end()
        raise


def _sayable(core: CoreProcess) -> Sequence[str]:
    """Return the lines that an error may show: users may connect before a core answers, and other lines name them.

    A core that exited without a line that says why was not up yet: all its lines are about its start.
    """
    said = fatal_lines(core.last_lines)
    ended = core.exit is not None and core.exit.code > 0
    return core.last_lines if ended and not said else said


def _why(core: CoreProcess, cause: Callable[[Sequence[str]], str]) -> str:
    """Return the end of an error: why the core failed, if it said so."""
    lines = _sayable(core)
    return f": {cause(lines)}" if lines else ""


def judge(done: Done, verdict: re.Pattern[str], cause: Callable[[Sequence[str]], str]) -> None:
    """Judge a core's check of a configuration.

    Raises `InvalidConfig` if the core exited with a line that matches `verdict`, or crashed; `CoreFailed`, after which
    the check may be repeated, if it was killed or exited without such a line.
    """
    if done.code == 0:
        return
    broke = [line for line in done.lines if line.startswith(PANIC)]
    if broke and not of_the_machine(broke[0]):
        raise InvalidConfig(f"the core crashed on the configuration: {unaliased(broke[0])}")
    said = cause(done.lines)
    if done.code > 0 and any(map(verdict.search, done.lines)) and not of_the_machine(said):
        raise refused(said)
    raise CoreFailed(f"the core did not finish checking the configuration ({done.how}): {said}")


def of_the_machine(said: str) -> bool:
    """Whether an error of a core blames the machine, which lacks memory, descriptors or the like."""
    return any(words in said for words in _OF_THE_MACHINE)


def refused(cause: str) -> InvalidConfig:
    return InvalidConfig(f"the core refuses the configuration: {cause}")


def last(lines: Sequence[str]) -> str:
    """Return the panic line, or else the last lines, for the text of an error."""
    panic = next((line for line in lines if line.startswith(PANIC)), None)
    return unaliased(panic or "\n".join(lines[-LAST_LINES:]) or "it printed nothing")
