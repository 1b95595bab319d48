"""A core that comes up: building what it runs from, waiting until it answers, and saying why it does not."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThreadPool

from drivers.process.child import PANIC, CoreProcess
from drivers.process.spawn import Done
from node.contract.accounts import Accounts
from node.errors import CoreFailed, InvalidConfig, PortTaken
from node.reactor import PooledReactor

T = TypeVar("T")

# Above this many users a configuration is built in the reactor's pool.
BUILD_INLINE = 5000
# Above this many characters a controller's text is read there.
READ_INLINE = 64 * 1024
# Seconds between two looks at a core that is starting.
POLL = 0.002
# Seconds that one question to it may take.
CALL = 1.0
# Lines of the core in the text of an error.
LAST_LINES = 5
# What a core may say of the machine that it runs on: no configuration is at fault then.
_OF_THE_MACHINE = (
    "cannot allocate memory",
    "too many open files",
    "no space left on device",
    "resource temporarily unavailable",
    "input/output error",
)


async def built(reactor: PooledReactor, target: Mapping[str, Accounts], build: Callable[..., T], *arguments: Any) -> T:
    """What `build` makes of its arguments for these users; in the reactor's pool where they are many."""
    return await _aside(reactor, sum(map(len, target.values())) > BUILD_INLINE, build, *arguments)


async def read(reactor: PooledReactor, text: str, reading: Callable[..., T], *arguments: Any) -> T:
    """What `reading` makes of its arguments, which are or come from this text; of a long one in the reactor's pool.

    Raises `InvalidConfig` for one that is nested deeper than Python reads.
    """
    try:
        return await _aside(reactor, len(text) > READ_INLINE, reading, *arguments)
    except RecursionError as error:
        raise InvalidConfig("the configuration is nested too deeply") from error


async def _aside(reactor: PooledReactor, dear: bool, work: Callable[..., T], *arguments: Any) -> T:
    if not dear:
        return work(*arguments)
    return await deferToThreadPool(reactor, reactor.getThreadPool(), work, *arguments)


async def ready(
    reactor: IReactorTime,
    core: CoreProcess,
    answers: Callable[[], Awaitable[bool]],
    seconds: float,
    is_refusal: Callable[[CoreProcess], bool],
    cause: Callable[[Sequence[str]], str],
) -> None:
    """Wait until the core answers, and leave no process if it does not.

    `is_refusal` tells whether a core that ended did not like its configuration, `cause` what it said of that. Raises
    `CoreFailed` with its last words, `PortTaken` or `InvalidConfig`.
    """
    deadline = reactor.seconds() + seconds
    try:
        while core.exit is None:
            if reactor.seconds() > deadline:
                raise CoreFailed(f"the core did not answer within {seconds:g} s: {cause(core.last_lines)}")
            if await answers():
                return
            await deferLater(reactor, POLL)
        if is_refusal(core) and not of_the_machine(cause(core.last_lines)):
            raise refused(cause(core.last_lines))
        if any("address already in use" in line for line in core.last_lines):
            raise PortTaken(f"the core cannot have its port: {cause(core.last_lines)}")
        raise CoreFailed(f"the core did not start ({core.exit.how}): {cause(core.last_lines)}")
    except BaseException:
        await core.stop()
        raise


def judge(done: Done, verdict: re.Pattern[str], cause: Callable[[Sequence[str]], str]) -> None:
    """Hear what a core says of a configuration that it was to look at.

    Raises `InvalidConfig` if it ended by itself with a line that is a `verdict`, or broke over it; `CoreFailed`, after
    which it may be asked again, if it was killed or ended without one.
    """
    if done.code == 0:
        return
    broke = [line for line in done.lines if line.startswith(PANIC)]
    if broke and not of_the_machine(broke[0]):
        raise InvalidConfig(f"the core breaks over the configuration: {broke[0]}")
    said = cause(done.lines)
    if done.code > 0 and any(map(verdict.search, done.lines)) and not of_the_machine(said):
        raise refused(said)
    raise CoreFailed(f"the core did not finish its look at the configuration ({done.how}): {said}")


def of_the_machine(said: str) -> bool:
    """Whether a core's words are about what the machine could not give it."""
    return any(words in said for words in _OF_THE_MACHINE)


def refused(cause: str) -> InvalidConfig:
    return InvalidConfig(f"the core refuses the configuration: {cause}")


def last(lines: Sequence[str]) -> str:
    """Of these lines why the core broke, or else their end, for the text of an error."""
    panic = next((line for line in lines if line.startswith(PANIC)), None)
    return panic or "\n".join(lines[-LAST_LINES:]) or "it said nothing"
