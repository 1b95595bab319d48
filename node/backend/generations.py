"""The runs of the core: the current one, those that drain, those that are ending. Whoever needs them holds this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from node.contract.driver import Generation


class Generations:
    """Each run is in one place at a time; a run that is gone is in none.

    The current one serves new connections. A draining one serves those that it has, and nobody else. An ending one
    serves nobody, and still counts until its last reading.
    """

    def __init__(self) -> None:
        self._current: Generation | None = None
        self._draining: list[Generation] = []
        self._ending: list[Generation] = []
        self._watchers: list[Callable[[], None]] = []

    @property
    def current(self) -> Generation | None:
        return self._current

    @property
    def draining(self) -> Sequence[Generation]:
        """Oldest first."""
        return tuple(self._draining)

    @property
    def ending(self) -> Sequence[Generation]:
        return tuple(self._ending)

    @property
    def serving(self) -> Sequence[Generation]:
        """Every run that has somebody's connections: who is online and who is removed is asked of all of them."""
        return (*filter(None, (self._current,)), *reversed(self._draining))

    @property
    def counting(self) -> Sequence[Generation]:
        """Every run that still counts, ending ones included."""
        return (*self.serving, *self._ending)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each join and exit."""
        self._watchers.append(changed)

    def adopt(self, generation: Generation) -> None:
        """This run is the current one now, new or taken back; the one before it drains."""
        self._draining += filter(None, (self._current,))
        self._forget(generation)
        self._current = generation
        self._tell()

    def inherit(self, draining: Iterable[Generation]) -> None:
        """An earlier program of the node has left these, oldest first: they drain."""
        self._draining[:0] = draining
        self._tell()

    def retire(self) -> None:
        """The current run drains; there is none until the next is adopted."""
        if self._current is not None:
            self._draining.append(self._current)
            self._current = None
            self._tell()

    def end(self, generation: Generation) -> None:
        """This run is ending."""
        if generation not in self._ending:
            self._forget(generation)
            self._ending.append(generation)
            self._tell()

    def gone(self, generation: Generation) -> bool:
        """This run is over. Returns whether it served, so that nobody had asked it to end."""
        served = generation in self.serving
        if served or generation in self._ending:
            self._forget(generation)
            self._tell()
        return served

    def _forget(self, generation: Generation) -> None:
        if self._current is generation:
            self._current = None
        for place in (self._draining, self._ending):
            if generation in place:
                place.remove(generation)

    def _tell(self) -> None:
        for changed in self._watchers:
            changed()
