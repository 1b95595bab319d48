"""Sums over a profile's stacks: by thread, by package, by function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

# Each stack is a thread, then its functions, outermost first; with microseconds of processor time.
Stacks = list[tuple[tuple[str, ...], int]]
_OURS = ("node.", "drivers.")
_TOP = 15
# The name of the sampling thread.
SAMPLER = "sampler"


def parsed(text: str) -> Stacks:
    """Parse lines of `thread;outermost;...;innermost microseconds`."""
    pairs = (line.rpartition(" ") for line in text.splitlines())
    return [(tuple(stack.split(";")), int(micros)) for stack, _, micros in pairs]


def by_thread(stacks: Stacks) -> Counter[str]:
    return _sums((stack[:1], micros) for stack, micros in stacks)


def by_package(stacks: Stacks) -> Counter[str]:
    """By the package of the innermost function, two levels deep for the node's own, drivers and Twisted."""
    return _sums(([_package(stack[-1])], micros) for stack, micros in stacks)


def within(stacks: Stacks) -> Counter[str]:
    """By functions of the project, with the functions that they call; a recursive one counts once."""
    return _sums(({name for name in stack[1:] if name.startswith(_OURS)}, micros) for stack, micros in stacks)


def itself(stacks: Stacks) -> Counter[str]:
    """By the innermost function, with the C functions that it calls."""
    return _sums((stack[-1:], micros) for stack, micros in stacks)


def report(stacks: Stacks, used: float) -> Iterator[str]:
    """The sums as lines of text. Shares are of the process's processor time without the sampler's."""
    looking = sum(micros for stack, micros in stacks if stack[0] == SAMPLER)
    stacks = [(stack, micros) for stack, micros in stacks if stack[0] != SAMPLER]
    used -= looking / 1e6
    unseen = max(0.0, 1 - sum(micros for _, micros in stacks) / 1e6 / used)
    yield f"{used:.2f} s; {unseen:.0%} of it in threads without Python (gRPC's), or between two samples"
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
