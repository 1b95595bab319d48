"""The calls that bring the core's rules to the wanted ones, with any of them unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from drivers.process.channel import ApiFailed, Channel
from drivers.xray.api import Router
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

    async def call(self, path: str, request: Message, _: type[Any], __: float = 5.0) -> None:
        self.silent -= 1
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

    def _do(self, request: Message) -> None:
        if isinstance(request, xray_pb2.AddRuleRequest):
            [rule] = RouterConfig.FromString(request.config.value).rule
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
