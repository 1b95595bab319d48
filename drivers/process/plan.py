"""The base classes of drivers and of their plans: the parts that are the same for all cores."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from drivers.process import json_text
from drivers.process.abuse import listed
from drivers.process.aliases import PLAIN, Aliases
from drivers.process.closed import Closed
from drivers.process.confinement import Touched
from drivers.process.executable import Executable, Installation
from drivers.process.settings import USER_INBOUNDS
from drivers.process.starting import judge
from drivers.sockets.held import Shelf
from drivers.sockets.sharing import Sharing
from node.base.errors import CoreFailed
from node.contract.abilities import NotShared
from node.contract.accounts import Account
from node.contract.driver import Done, Plan
from node.contract.leaving import Leaves
from protos.handover_pb2 import Common
from protos.service_pb2 import User


class Made(Protocol):
    """A parsed configuration."""

    @property
    def tags(self) -> Sequence[str]: ...

    @property
    def aliased(self) -> Sequence[str]:
        """The managed inbounds where users may have other names in the core than their own."""

    @property
    def inbounds(self) -> Mapping[str, object]:
        """The managed inbounds by tag, with what accounts depend on."""

    @property
    def warnings(self) -> Sequence[str]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def binding(self) -> Closed: ...

    def account(self, tag: str, user: User) -> Account | None: ...

    def same_credential(self, one: bytes, other: bytes) -> bool: ...


_LOGINS = (
    "USER_INBOUNDS: bytes in {} count for their user alone, without the inbound: users log in there by their names"
)

M = TypeVar("M", bound=Made)
C = TypeVar("C", bound="CoreDriver")


class CoreDriver(ABC):
    """The part of a driver, with `node.contract.leaving.LeavesAll`, that is the same for all cores.

    `verdict` matches a line of a check that refuses a configuration.
    """

    verdict: ClassVar[re.Pattern[str]]

    def __init__(self, installation: Installation) -> None:
        self.host = host = installation.host
        self.installation = installation
        self.sharing = Sharing(host.reactor, Shelf(host.keeper, f"sharing/{installation.core.name}"))

    @staticmethod
    @abstractmethod
    def cause(lines: Sequence[str]) -> str:
        """Return why the core ended, from its last lines."""

    async def look(self, executable: Executable, *arguments: str, stdin: bytes, output: int = 3) -> Done:
        """Run a checking command with a configuration on stdin. Raises as `starting.judge`."""
        done = await executable.run(*arguments, stdin=stdin, output=output)
        judge(done, self.verdict, self.cause)
        return done

    def fingerprint(self, config_text: str) -> str:
        return json_text.fingerprint(config_text)

    async def version(self) -> str:
        return await self.installation.version()

    async def leave(self) -> bytes:
        await self.sharing.leave()
        return self.installation.packed.SerializeToString()

    def rehearse(self, begin: bool) -> None:
        self.installation.keep(begin)

    def go_on(self, packed: bytes) -> None:
        self.installation.go_on(Common.FromString(packed))
        try:
            self.sharing.go_on()
        except OSError as error:
            raise CoreFailed(f"the listeners of the cores could not be taken over: {error}") from error

    async def recover(self, plan: Plan, left: bytes, exact: bool) -> Leaves:
        assert isinstance(plan, CorePlan)
        return await plan.recover(left, exact)

    async def remain(self, pids: Collection[int], lead: int | None) -> None:
        self.installation.look_again()
        try:
            await self.sharing.remain(pids, lead)
        except NotShared as error:
            raise CoreFailed(str(error)) from error


class CorePlan(Generic[C, M]):
    """The part of `node.contract.driver.Plan` that is the same for all cores.

    `made` is the parsed configuration, `touched` the files and ports that it names, `chosen` the executable that an
    update had chosen when it was made.
    """

    def __init__(self, core: C, made: M, touched: Touched, chosen: Path | None = None) -> None:
        self._core = core
        self._host = core.host
        self.made = made
        # Bound here, as they are called for each user and inbound.
        self.account = made.account
        self.same_credential = made.same_credential
        self._touched = touched
        self._chosen = chosen

    @property
    def tags(self) -> Sequence[str]:
        return self.made.tags

    @property
    def _by_inbound(self) -> bool:
        return self._host.settings.get(USER_INBOUNDS.name) == "on"

    @property
    def _aliases(self) -> Aliases:
        """The names that a new run has for users."""
        return Aliases(self.made.aliased) if self._by_inbound else PLAIN

    @property
    def warnings(self) -> Sequence[str]:
        return [*self.made.warnings, *filter(None, [self._core.installation.unconfined, self.made.binding.moved])]

    @property
    def notes(self) -> Sequence[str]:
        aliased = {*self.made.aliased}
        named = [tag for tag in self.made.tags if tag not in aliased] if self._by_inbound else []
        return [*self.made.notes, *([_LOGINS.format(listed(named))] if named else [])]

    async def _executable(self) -> Executable:
        """Return the executable to run now, confined to this configuration."""
        return (await self._core.installation.current(self._chosen)).touching(self._touched)

    async def recover(self, left: bytes, exact: bool) -> Leaves:
        """Take over a run of this plan: see `node.contract.leaving.LeavesAll.recover`."""
        raise NotImplementedError

    def alike(self, other: Plan) -> bool:
        return isinstance(other, type(self)) and self.made.inbounds == other.made.inbounds
