"""The part: what it does about requests, how often it reports, and what it forgets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from node.abuse.abuse import BLIND, LOOK, Abuse
from node.abuse.cases import EXAMPLES, OVER
from node.abuse.parsing import by_inbound, by_kind
from node.contract.abuse import AbuseRules, Request
from node.contract.generations import Generations
from node.events.kinds import Kind
from protos.service_pb2 import BaseInfoResponse

HERE, THERE = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])


class Run:
    """A core that reports requests."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.exempt: Collection[str] | None = None

    def requests(self, exempt: Collection[str]) -> Sequence[Request]:
        self.exempt = exempt
        found, self.asked = self.asked, []
        return found

    def ask(self, key: str, target: str, address: bytes = HERE, tag: str = "in", *, torrent: bool = False) -> None:
        self.asked.append(Request(key, address, tag, target, udp=False, torrent=torrent))


class AbuseTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000)
        self.run_ = Run()
        self.generations = Generations()
        self.events: list[tuple[Kind, str, dict[str, object]]] = []
        self.done: list[tuple[object, ...]] = []
        self.off: set[str] = set()
        self.spared: set[str] = set()

    def begin(self, text: str, inbounds: str = "", exempt: Collection[str] = ()) -> Abuse:
        this: Any = self
        rules = AbuseRules(by_kind(text), by_inbound(inbounds), frozenset(exempt))
        made = Abuse(this.clock, self.generations, this, this, rules, now=lambda: 1e9 + self.clock.seconds())
        self.patch(Generations, "serving", [self.run_])
        made.start()
        self.addCleanup(made.stop)
        return made

    # What the part uses of the limits and of the journal

    def cut(self, key: str, seconds: float) -> None:
        self.done.append(("cut", key, seconds))
        self.off.add(key)

    def slow(self, key: str, seconds: float, speed: int) -> None:
        self.done.append(("slow", key, seconds, speed))

    def is_off(self, key: str) -> bool:
        return key in self.off

    def is_spared(self, key: str) -> bool:
        return key in self.spared

    def name_of(self, key: str) -> str:
        return key.title()

    def tell(self, kind: Kind, text: str, **fields: object) -> None:
        self.events.append((kind, text, fields))

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(LOOK)

    def test_an_event(self) -> None:
        """It has what a hoster asks for."""
        self.begin("torrent: tell")
        self.run_.ask("anna", "198.51.100.1:6000", torrent=True)
        self.run_.ask("anna", "198.51.100.2:6000", THERE, torrent=True)
        self.run_.ask("anna", "198.51.100.2:6000", THERE, torrent=True)
        self.look()
        ((kind, text, fields),) = self.events
        self.assertIs(kind, Kind.ABUSE_TORRENT)
        targets = "tcp 198.51.100.1:6000, tcp 198.51.100.2:6000"
        self.assertEqual(
            fields,
            {
                "user": "Anna",
                "address": "192.0.2.1, 192.0.2.2",
                "times": 3,
                "first": "2001-09-09T02:03:20Z",
                "last": "2001-09-09T02:03:20Z",
                "targets": targets,
                "action": "tell",
            },
        )
        self.assertEqual(text, f"'Anna' uses BitTorrent, from 192.0.2.1, 192.0.2.2: 3 times, {targets}")
        self.assertFalse(self.done)

    def test_one_event_a_minute(self) -> None:
        """Of each user and kind, however often; the count goes on, and after a long time it begins again."""
        made = self.begin("torrent: tell; mail: tell")
        for number in range(240):
            self.run_.ask("anna", f"198.51.100.{number}:6000", torrent=True)
            self.run_.ask("anna", "mx.example:25")
            self.run_.ask("bert", "mx.example:25")
            self.look()
        times = [(fields["user"], fields["times"]) for kind, _, fields in self.events if kind is Kind.ABUSE_TORRENT]
        self.assertEqual(times, [("Anna", 1), ("Anna", 121)])
        self.assertEqual(sum(kind is Kind.ABUSE_MAIL for kind, _, _ in self.events), 4)
        self.assertEqual(len(str(self.events[-1][2]["targets"]).split(", ")), 1)
        self.assertEqual(len(str(self.events[-2][2]["targets"]).split(", ")) <= EXAMPLES, True)
        self.look(200)
        self.assertEqual(len(self.events), 9)  # what came since the last event of each, once
        self.clock.advance(OVER)
        self.run_.ask("anna", "198.51.100.1:6000", torrent=True)
        self.look()
        self.assertEqual(self.events[-1][2]["times"], 1)
        info = BaseInfoResponse()
        made.summary(info)
        self.assertEqual((info.limits.abuse["torrent"].requests, info.limits.abuse["torrent"].cases), (241, 2))
        self.assertEqual((info.limits.abuse["mail"].requests, info.limits.abuse["mail"].cases), (480, 2))

    def test_actions(self) -> None:
        """Cut once, until the user is back; slow; both not for those whom their limits spare."""
        self.spared = {"cora"}
        self.begin("torrent: cut 1m; mail: slow 2M 5m")
        for key in ("anna", "cora"):
            for _ in range(3):
                self.run_.ask(key, "198.51.100.1:6000", torrent=True)
        self.run_.ask("bert", "mx.example:25")
        self.look()
        self.assertEqual(self.done, [("cut", "anna", 60), ("slow", "bert", 300, 2_000_000)])
        actions = {fields["user"]: fields["action"] for _, _, fields in self.events}
        self.assertEqual(actions, {"Anna": "cut", "Bert": "slow", "Cora": "tell"})
        self.off.clear()
        self.run_.ask("anna", "198.51.100.1:6000", torrent=True)
        self.look()
        self.assertEqual(self.done[2:], [("cut", "anna", 60)])

    def test_by_inbound_and_exempt(self) -> None:
        """Each inbound has its rules, and the core is asked to leave exempt users out."""
        self.begin("torrent: cut", "free: torrent tell; staff: off", {"bert"})
        for tag in ("free", "staff"):
            self.run_.ask("anna", "198.51.100.1:6000", tag=tag, torrent=True)
        self.look()
        self.assertEqual(self.run_.exempt, {"bert"})
        self.assertEqual([fields["times"] for _, _, fields in self.events], [1])
        self.assertFalse(self.done)

    def test_what_no_core_blocks_is_only_reported(self) -> None:
        """A torrent that is found by behaviour, with the action block."""
        self.begin("torrent: block")
        for number in range(100):
            self.run_.ask("anna", f"198.51.100.{number}:{2000 + 37 * number}")
        self.run_.ask("bert", "198.51.100.1:6000", torrent=True)
        self.look()
        actions = {fields["user"]: fields["action"] for _, _, fields in self.events}
        self.assertEqual(actions, {"Anna": "tell", "Bert": "block"})

    def test_without_rules(self) -> None:
        """No core is asked, so none collects anything."""
        made = self.begin("")
        made.moved()
        self.look(10)
        self.assertIsNone(self.run_.exempt)
        self.assertFalse(made.warnings)

    def test_quiet_users_are_forgotten(self) -> None:
        """After two minutes nothing is kept of them."""
        made = self.begin("scan: tell")
        for number in range(100):
            self.run_.ask(f"user{number}", "a.example:443")
        self.look()
        self.assertEqual(len(made._watches), 100)
        self.look(300)
        self.assertFalse(made._watches)

    def test_a_core_that_reports_nothing(self) -> None:
        """A warning says so; with rules only."""
        made, without = self.begin("scan: tell"), self.begin("")
        self.patch(Generations, "serving", [object()])
        self.assertEqual((made.warnings, without.warnings), ([BLIND], []))
