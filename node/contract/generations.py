"""The registry of the core's runs: starting, current, draining and ending ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from node.contract.driver import Generation


class Follower:
    """Follows the life of each run. It overrides those of these methods that concern it."""

    def joined(self, run: Generation) -> None:
        """The run may have users' connections from now on."""

    def drains(self, run: Generation) -> None:
        """The run gets no new connections from now on."""

    def left(self, run: Generation) -> None:
        """The run has no users' connections any more: it ends, or has ended."""

    def moved(self) -> None:
        """Some run has entered another stage; called after all followers know who joined, drains or left."""


class Generations:
    """Tracks which stage each run is in: coming, taking over, current, draining, ending, gone. One stage at a time.

    A coming run answers; it gets its first connections when it takes over. The current one serves new connections, a
    draining one only those that it has. An ending one serves none; its counters are read until it is gone.
    """

    def __init__(self) -> None:
        self._coming: list[Generation] = []
        # Runs that new connections are being directed to, though none of them is the current one yet.
        self._taking_over: list[Generation] = []
        self.current: Generation | None = None
        self._draining: list[Generation] = []
        self._ending: list[Generation] = []
        # The serving and the draining runs, as the followers know them.
        self._known: tuple[Sequence[Generation], Sequence[Generation]] = (), ()
        self._followers: list[Follower] = []

    @property
    def taking_over(self) -> Sequence[Generation]:
        """Runs that may get new connections from the kernel already, though none of them is the current one yet."""
        return tuple(self._taking_over)

    @property
    def draining(self) -> Sequence[Generation]:
        """Oldest first."""
        return tuple(self._draining)

    @property
    def ending(self) -> Sequence[Generation]:
        return tuple(self._ending)

    @property
    def serving(self) -> Sequence[Generation]:
        """Every run that may have users' connections, newest first: online users and removals concern all of them.

        Runs that take over are last.
        """
        return (*filter(None, (self.current,)), *reversed(self._draining), *self._taking_over)

    @property
    def counting(self) -> Sequence[Generation]:
        """Every run whose counters are read: from before its first connection until its last reading."""
        return (*self.serving, *self._coming, *self._ending)

    def follow(self, follower: Follower) -> None:
        """Tell this one what becomes of each run, after those who follow already."""
        self._followers.append(follower)

    def come(self, generation: Generation) -> None:
        """Add a run that answers and has no connections yet."""
        self._coming.append(generation)
        self._notify()

    def take_over(self, generation: Generation) -> None:
        """Note that new connections are about to be directed to this run."""
        self._forget(generation)
        self._taking_over.append(generation)
        self._notify()

    def adopt(self, generation: Generation) -> None:
        """Make a run, new or taken back, the current one; the one before it drains."""
        self._draining += filter(None, (self.current,))
        self.current = None
        self._forget(generation)
        self.current = generation
        self._notify()

    def drain(self, generation: Generation) -> None:
        """Have a run drain that took over and was given up for an earlier one: it counts as older than that one."""
        self._forget(generation)
        self._draining.insert(len(self._draining) - (self.current is None), generation)
        self._notify()

    def inherit(self, draining: Iterable[Generation]) -> None:
        """Add draining runs, oldest first, that the previous node process handed over."""
        self._draining[:0] = draining
        self._notify()

    def retire(self) -> None:
        """Have the current run drain; there is no current one until the next is adopted."""
        if self.current is not None:
            self._draining.append(self.current)
            self.current = None
            self._notify()

    def end(self, generation: Generation) -> None:
        """Note that this run is ending."""
        if generation not in self._ending:
            self._forget(generation)
            self._ending.append(generation)
            self._notify()

    def gone(self, generation: Generation) -> bool:
        """Remove a run whose process is gone. Returns whether it crashed: it still served."""
        served = generation in self.serving
        if generation in self.counting:
            self._forget(generation)
            self._notify()
        return served

    def _forget(self, generation: Generation) -> None:
        if self.current is generation:
            self.current = None
        for place in (self._coming, self._taking_over, self._draining, self._ending):
            if generation in place:
                place.remove(generation)

    def _notify(self) -> None:
        serving, draining = self._known
        self._known = self.serving, self.draining
        joined = [run for run in self.serving if run not in serving]
        drain = [run for run in self.draining if run not in draining]
        left = [run for run in serving if run not in self.serving]
        for follower in self._followers:
            for run in joined:
                follower.joined(run)
            for run in drain:
                follower.drains(run)
            for run in left:
                follower.left(run)
        for follower in self._followers:
            follower.moved()
