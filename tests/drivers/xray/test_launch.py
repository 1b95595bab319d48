"""What a new run tells about the users whom its first rules keep out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drivers.xray import driver
from drivers.xray.bars import Bars
from drivers.xray.driver import Xray, XrayPlan
from node.contract.accounts import Accounts


class Started:
    """A core that starts; meanwhile all are let in."""

    def __init__(self, barred: dict[str, Any]) -> None:
        self._barred = barred

    async def ready(self, *_: object) -> None:
        self._barred.clear()


class Run:
    barred: object = None

    async def reroute(self, _: object) -> None:
        pass


class Plan(XrayPlan):
    """A plan whose core is not really started."""

    async def _executable(self) -> Any:
        return SimpleNamespace(start=lambda *_, **__: None)

    def _new_api(self, _: object) -> Any:
        return SimpleNamespace(token="token", socket="/nowhere")

    async def _rendered(self, _: object, __: object, first: bytes, ___: object) -> bytes:
        return first

    def _process(self, _: object) -> Any:
        return None, None


@pytest.mark.parametrize("nesting", [(b"\x5a", b"\x12"), ()])
def test_who_is_let_in_while_a_core_starts(monkeypatch: pytest.MonkeyPatch, nesting: tuple[bytes, ...]) -> None:
    """Its rules keep them out all the same, and the run says so."""
    barred: dict[str, Any] = {"anna": ["10.0.0.1"]}

    async def bars(*_: object) -> Bars:
        return Bars("token", nesting, barred)

    monkeypatch.setattr(driver, "Started", lambda *_: Started(barred))
    monkeypatch.setattr(driver, "XrayGeneration", lambda *_: Run())
    monkeypatch.setattr(driver, "Api", lambda *_: None)
    monkeypatch.setattr(driver, "read_by", lambda *_: None)
    monkeypatch.setattr(driver, "are_reloaded", lambda *_: False)
    core = SimpleNamespace(host=SimpleNamespace(reactor=None, settings={}), sharing=None, bars=bars, cause=None)
    made = SimpleNamespace(account=None, same_credential=None, base=None)
    plan = Plan(cast(Xray, core), cast(Any, made), cast(Any, None))
    accounts: dict[str, Accounts] = {"in": {"anna": b"\x12\x04anna"}}
    run = asyncio.run(plan.launch(accounts, 1.0))
    assert run.barred == ({"anna": ["10.0.0.1"]} if nesting else {})
