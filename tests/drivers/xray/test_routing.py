"""The calls that bring the core's rules to the wanted ones, with any of them unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from drivers.process.channel import ApiFailed, Channel
from drivers.xray.api import Router
from drivers.xray.rules import other_tag, own_tag
from node.http2.stream import Status
from protos import xray_pb2
from protos.xray_pb2 import RouterConfig, RoutingRule


def tagged(*tags: str) -> list[RoutingRule]:
    return [RoutingRule(tag="direct", rule_tag=tag) for tag in tags]


class Core:
    """Replaces the channel: the tags that the core has.

    The call to which `silent` counts down gets no answer. It is applied all the same (`done`), `never`, or `late`:
    after the next call.
    """

    def __init__(self, *tags: str) -> None:
        self.tags = list(tags)
        self.targets: dict[str, str] = {}
        self.silent = -1
        self.when = "done"
        self._late: list[Message] = []

    async def call(self, path: str, request: Message, _: type[Any], __: float = 5.0) -> object:
        self.silent -= 1
        if path.endswith("ListRule") and self.silent:
            return xray_pb2.ListRuleResponse(rules=[xray_pb2.ListedRule(rule_tag=tag) for tag in self.tags])
        if not self.silent:
            if self.when == "done":
                self._do(request)
            elif self.when == "late":
                self._late.append(request)
            raise ApiFailed("no answer", Status.DEADLINE_EXCEEDED)
        try:
            self._do(request)
        finally:
            while self._late:
                self._do(self._late.pop())
        return None

    def _do(self, request: Message) -> None:
        if isinstance(request, xray_pb2.AddRuleRequest):
            # Those before a duplicate stay, as in cores before 26.6.
            for rule in RouterConfig.FromString(request.config.value).rule:
                if rule.rule_tag in self.tags:
                    raise ApiFailed("duplicate ruleTag", 2)
                self.tags.append(rule.rule_tag)
        elif isinstance(request, xray_pb2.RemoveRuleRequest):
            self.tags = [tag for tag in self.tags if tag != request.rule_tag]
        elif isinstance(request, xray_pb2.OverrideBalancerTargetRequest):
            self.targets[request.balancer_tag] = request.target


def become(core: Core, *wanted: tuple[Sequence[str], Mapping[str, str]]) -> None:
    """Apply one set of rules after the other, also after failures."""

    async def work() -> None:
        router = Router(cast(Channel, core), tagged(*core.tags))
        for tags, targets in wanted:
            try:
                await router.become(tagged(*tags), targets)
            except ApiFailed:
                continue

    asyncio.run(work())


NODES = own_tag("closed-0")


def bar(core: Core, *steps: tuple[Sequence[str], Sequence[str]]) -> None:
    """Keep users out by rules with these tags, and then apply these rules; twice, also after failures."""

    async def work() -> None:
        router = Router(cast(Channel, core), tagged(*core.tags))
        for bars, tags in steps:
            for _ in range(2):
                with suppress(ApiFailed):
                    await router.bar(tagged(*bars), is_bar)
                with suppress(ApiFailed):
                    await router.become(tagged(*tags), {})
        await router.bar(tagged(*steps[-1][0]), is_bar)

    asyncio.run(work())


def is_bar(tag: str) -> bool:
    return tag.startswith("out")


def seen(core: Core) -> list[str]:
    """The tags that the core has, as they were before they were moved."""
    return [min(tag, other_tag(tag), key=len) for tag in core.tags]


@pytest.mark.parametrize("when", ["done", "never", "late"])
@pytest.mark.parametrize("silent", range(25))
@pytest.mark.parametrize("then", [["a", NODES, "b"], ["a", NODES, "c", "d"], [NODES]])
def test_bars_come_first(then: list[str], silent: int, when: str) -> None:
    """Whatever call has no answer, the others follow them once each, in their order."""
    core = Core("a", NODES, "b")
    core.silent, core.when = silent, when
    first = ["a", NODES, "b"]
    bar(core, (["out-1"], first), (["out-1", "out-2"], first), (["out-2"], then), (["out-2", "out-3"], then))
    assert sorted(seen(core)[:2]) == ["out-2", "out-3"]
    assert seen(core)[2:] == then


def test_the_next_node_goes_on() -> None:
    """It finds the rules under their other tags, and those of a move that was broken off."""
    again = [other_tag(tag) for tag in ("a", NODES, "b")]
    for tags in (
        ["out", *again],
        ["a", NODES, "b", "out", again[0]],
        ["a", "out", *again],
        ["a", NODES, "b", "out", *again],
    ):
        core = Core("a", NODES, "b")

        async def work(core: Core = core, tags: Sequence[str] = tags) -> list[str]:
            router = Router(cast(Channel, core), tagged(*core.tags))
            core.tags = list(tags)
            found = await router.go_on()
            await router.bar(tagged("out"), is_bar)
            await router.become(tagged("a", NODES, "c"), {})
            return found

        assert asyncio.run(work()) == tags
        assert seen(core) == ["out", "a", NODES, "c"]


@pytest.mark.parametrize("when", ["done", "never", "late"])
@pytest.mark.parametrize("silent", range(1, 6))
@pytest.mark.parametrize("then", [["a", "b", "c"], ["new"], ["new", "more"]])
def test_a_call_without_an_answer(then: list[str], silent: int, when: str) -> None:
    """Its effect is unknown; the rules wanted next are there in the end, even the former ones."""
    core = Core("a", "b", "c")
    core.silent, core.when = silent, when
    # Twice: the node applies the wanted rules again every minute.
    become(core, (["new"], {"b": "x"}), (then, {"b": "y"}), (then, {"b": "y"}))
    assert (core.tags, core.targets) == (then, {"b": "y"})


def test_former_rules_take_no_memory() -> None:
    """Controllers may add and remove large rules for months."""

    async def work() -> int:
        router = Router(cast(Channel, Core("a")), tagged("a"))
        for number in range(100):
            await router.become(tagged("a", str(number)), {})
        return len(router._rules)

    assert asyncio.run(work()) == 2
