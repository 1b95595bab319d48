"""Sums over the stacks of a profile: by thread, by package, by function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

# Each a thread, then its functions from the outermost to the innermost, and microseconds of processor time.
Stacks = list[tuple[tuple[str, ...], int]]
_OURS = ("node.", "drivers.")
_TOP = 15
# The thread that looks.
SAMPLER = "sampler"


def parsed(text: str) -> Stacks:
    """Lines of `thread;outermost;...;innermost microseconds`."""
    pairs = (line.rpartition(" ") for line in text.splitlines())
    return [(tuple(stack.split(";")), int(micros)) for stack, _, micros in pairs]


def by_thread(stacks: Stacks) -> Counter[str]:
    return _sums((stack[:1], micros) for stack, micros in stacks)


def by_package(stacks: Stacks) -> Counter[str]:
    """By that of the innermost function; of ours by the room."""
    return _sums(([_package(stack[-1])], micros) for stack, micros in stacks)


def within(stacks: Stacks) -> Counter[str]:
    """By our functions, what they call included; a recursive one counts once."""
    return _sums(({name for name in stack[1:] if name.startswith(_OURS)}, micros) for stack, micros in stacks)


def itself(stacks: Stacks) -> Counter[str]:
    """By the innermost function: what it calls in C is its own."""
    return _sums((stack[-1:], micros) for stack, micros in stacks)


def report(stacks: Stacks, used: float) -> Iterator[str]:
    """Lines for people; shares are of the processor time of the process, without that of looking."""
    looking = sum(micros for stack, micros in stacks if stack[0] == SAMPLER)
    stacks = [(stack, micros) for stack, micros in stacks if stack[0] != SAMPLER]
    used -= looking / 1e6
    unseen = max(0.0, 1 - sum(micros for _, micros in stacks) / 1e6 / used)
    yield f"{used:.2f} s; {unseen:.0%} of it in threads without Python (gRPC's), or between two looks"
    parts = {"thread": by_thread, "innermost, by package": by_package, "with what it calls": within, "itself": itself}
    for title, sums in parts.items():
        yield f"\n{title}"
        for name, micros in sums(stacks).most_common(_TOP):
            yield f"  {micros / 1e6 / used:6.1%}  {name}"


def _sums(pairs: Iterable[tuple[Iterable[str], int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for names, micros in pairs:
        for name in names:
            found[name] += micros
    return found


def _package(function: str) -> str:
    parts: Sequence[str] = function.partition(":")[0].split(".")
    return ".".join(parts[:2]) if parts[0] in ("node", "drivers", "twisted") else parts[0]
