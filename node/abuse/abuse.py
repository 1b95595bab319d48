"""The part that finds abuse in the requests that cores report, does what the operator wants, and reports it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from node.abuse.cases import Case, Cases
from node.abuse.detectors import QUIET, Watch
from node.base.part import Part
from node.base.periodic import Periodic
from node.base.reactor import Reactor
from node.contract.abuse import AbuseRules, Action, Kind, Request, Rule, SeesRequests
from node.contract.generations import Follower, Generations
from node.events.journal import Tells
from node.events.kinds import Kind as Event
from node.limits.users import UserLimits
from protos.service_pb2 import BaseInfoResponse

# Seconds between two looks at the requests, and between two rounds that forget quiet users.
LOOK, TIDY = 0.5, 10.0
# Users watched at most.
MOST = 20_000
BLIND = "ABUSE: this core does not report the requests of users"

_EVENTS = {Kind.TORRENT: Event.ABUSE_TORRENT, Kind.SCAN: Event.ABUSE_SCAN, Kind.MAIL: Event.ABUSE_MAIL}
_TEXTS = {Kind.TORRENT: "uses BitTorrent", Kind.SCAN: "looks for open ports", Kind.MAIL: "sends mail (port 25)"}


class Abuse(Part, Follower):
    """Without rules it does nothing, and cores collect nothing for it."""

    title = "the watch for abuse"

    def __init__(
        self,
        reactor: Reactor,
        generations: Generations,
        limits: UserLimits,
        journal: Tells,
        rules: AbuseRules,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._reactor = reactor
        self._generations = generations
        self._limits = limits
        self._journal = journal
        self._rules = rules
        self._cases = Cases(now)
        self._watches: dict[str, Watch] = {}
        self._tidied = 0.0
        self._looking = Periodic("looking for abuse", self._look, LOOK, reactor)
        generations.follow(self)

    @property
    def warnings(self) -> list[str]:
        blind = self._rules and not all(isinstance(run, SeesRequests) for run in self._generations.serving)
        return [*([BLIND] if blind else []), *self._looking.warnings]

    def start(self) -> None:
        if self._rules:
            self._looking.start()

    def stop(self) -> None:
        self._looking.stop()

    def leave(self) -> None:
        self.stop()

    def summary(self, info: BaseInfoResponse) -> None:
        for kind, counted in self._cases.counts.items():
            info.limits.abuse[kind].CopyFrom(counted)

    def moved(self) -> None:
        """A core came or went: collect what a new one reports."""
        if self._rules:
            self._collect(self._reactor.seconds())

    def _collect(self, now: float) -> None:
        for run in self._generations.serving:
            if isinstance(run, SeesRequests):
                self.judge(run.requests(self._rules.exempt), now)

    def _look(self) -> None:
        now = self._reactor.seconds()
        self._collect(now)
        self._report(self._cases.due())
        if now >= self._tidied + TIDY:
            self._tidied = now
            self._watches = {key: watch for key, watch in self._watches.items() if watch.seen > now - QUIET}
            self._cases.tidy()

    def judge(self, requests: Iterable[Request], now: float) -> None:
        """Judge these requests, and act."""
        watches = self._watches
        for request in requests:
            watch = watches.get(request.key)
            if watch is None:
                if len(watches) >= MOST:
                    del watches[next(iter(watches))]
                watch = watches[request.key] = Watch(now)
            for kind in watch.judge(request, now):
                rule = self._rules.of(request.tag, kind)
                if rule.action is not Action.OFF:
                    self._act(kind, rule, request)

    def _act(self, kind: Kind, rule: Rule, request: Request) -> None:
        key = request.key
        action = rule.action
        if action in (Action.SLOW, Action.CUT) and self._limits.is_spared(key):
            action = Action.TELL
        if action is Action.BLOCK and kind is Kind.TORRENT and not request.torrent:
            action = Action.TELL  # found by behaviour, which no core blocks
        if action is Action.CUT and not self._limits.is_off(key):
            self._limits.cut(key, rule.seconds)
        elif action is Action.SLOW:
            self._limits.slow(key, rule.seconds, rule.speed)
        self._cases.add(kind, action, request)

    def _report(self, cases: Iterable[Case]) -> None:
        for case in cases:
            name = self._limits.name_of(case.key)
            text = f"{name!r} {_TEXTS[case.kind]}, from {case.addresses}: {case.times} times, {case.targets}"
            self._journal.tell(_EVENTS[case.kind], text, user=name, **case.fields)
