"""Another run of the same configuration, for changes of users that a core cannot take while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from node.backend.desired import Desired
from node.backend.faults import as_told
from node.backend.generations import Generations
from node.backend.replace import Check, Replacement
from node.backend.state import Status
from node.contract.accounts import Accounts, Change, Refusal, apply
from node.contract.driver import Generation, NotShared, Plan
from node.errors import CoreFailed, NodeError, NotStarted
from node.logs import Logger
from protos.service_pb2 import User

# Seconds that the new run may take to come up.
SECONDS = 5.0
# Seconds for which changes are collected that take a new run of the core, and at most while that would end one that
# drains early; and between two looks at whether it still would.
WINDOW = 0.3
CROWDED_WINDOW = 10.0
LOOK = 1.0


class Renewal:
    """Renews the current run. `failed` is told if no run came up where one should be."""

    log = Logger()

    def __init__(
        self,
        status: Status,
        desired: Desired,
        generations: Generations,
        replacement: Replacement,
        failed: Callable[[NodeError], None],
    ) -> None:
        self._status = status
        self._desired = desired
        self._generations = generations
        self._replacement = replacement
        self._failed = failed
        self.end = replacement.end
        # Whether runs are being left to another program: then none is to come for the sake of users who are out.
        self.paused = False

    @property
    def crowded(self) -> bool:
        """Whether another run ends one that drains before its time."""
        return self._replacement.crowded

    def window(self, collected: float) -> float:
        """Seconds for which changes are collected, more than these, before another run is begun for them."""
        if collected < WINDOW:
            return WINDOW
        return LOOK if self.crowded and collected < CROWDED_WINDOW else 0.0

    async def renew(self, run: Generation, left: Sequence[Change]) -> tuple[Generation, list[Refusal]]:
        """A run with these changes, or without those of them who come if the core refuses it with them.

        Whoever leaves is out either way. Returns the same run if nothing can be brought in, or if it is not wanted any
        more: a Start, a Stop or a crash came meanwhile. Raises `CoreFailed` if none came up.
        """
        if not (run.alive and run is self._generations.current and self._status.running):
            return run, []
        try:
            return await self._begin(run, left)
        except Exception as error:
            if not self._status.running:
                return run, []
            failure = CoreFailed(as_told(error).text)
            if self._generations.current is None:
                self._failed(failure)
            raise failure from error

    async def refresh(self, run: Generation) -> Generation:
        """A run that knows nothing of users who were removed, if it can come in at nobody's cost; else this one."""
        assert self._desired.accepted is not None
        if self.paused or self._replacement.lacks(run):
            return run
        plan, users = self._desired.accepted.runs, run.accounts
        try:
            return await self._replacement.beside(plan, lambda: self._still(users), 0.0, SECONDS)
        except (NodeError, NotShared) as error:
            self.log.info("removed users are kept out without another run: {reason}", reason=str(error))
            return run

    async def _begin(self, run: Generation, left: Sequence[Change]) -> tuple[Generation, list[Refusal]]:
        assert self._desired.accepted is not None
        plan, before = self._desired.accepted.runs, run.accounts
        wanted, staying = apply(left, before), apply([change._replace(packed=None) for change in left], before)

        async def check() -> None:
            await plan.check(wanted)
            if not run.alive:
                raise NotStarted("the core ended meanwhile")

        try:
            return await self._bring(plan, wanted, check), []
        except Exception as error:  # noqa: BLE001 - told to those who come; without them the core may come up
            self._status.require()
            if isinstance(error, NotStarted):
                return run, []
            fault = as_told(error).text
        if staying == run.accounts and run is self._generations.current:
            return run, self._refusals(left, fault)
        self.log.error("the core runs without changed users: {reason}", reason=fault)
        return await self._bring(plan, staying), self._refusals(left, fault)

    async def _bring(self, plan: Plan, accounts: Mapping[str, Accounts], check: Check | None = None) -> Generation:
        return await self._replacement.bring(plan, lambda: self._still(accounts), 0.0, SECONDS, check)

    def _still(self, accounts: Mapping[str, Accounts]) -> Mapping[str, Accounts]:
        """These, unless a Start or a Stop came meanwhile."""
        self._status.require()
        return accounts

    def _refusals(self, left: Sequence[Change], reason: str) -> list[Refusal]:
        """Of these nobody came in."""
        coming = [change for change in left if change.packed is not None]
        return [Refusal(self._spelled(change.key), f"{change.tag}: {reason}") for change in coming]

    def _spelled(self, key: str) -> str:
        """A user's e-mail as it was said."""
        packed = self._desired.roster.users.get(key)
        return key if packed is None else User.FromString(packed).email
