"""Speed limits: whose connections are checked when, and what is set, over all cores."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan
from node.contract.generations import Generations
from node.limits.connections import KNOWN, TURN, Connections
from node.limits.limits import NONE, Limit
from node.limits.pacer import EVERYBODY, GATHER, TICK, Pacer
from tests.harness.limited import Given
from tests.harness.paced import HERE, PacedGeneration

MBIT = 125_000
TEN, FIVE = Limit(down=10_000_000), Limit(down=5_000_000)


class PacerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = cast(Any, Clock())
        given: Any = Given()
        self.limits: dict[str, Limit] = given.limits
        self.generations = Generations()
        self.pacer = Pacer(self.clock, Connections(self.generations, given))
        self.run_ = self.runs("anna", "bert", "carl")
        self.pacer.start()
        self.clock.advance(0)

    def tearDown(self) -> None:
        self.pacer.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def runs(self, *keys: str, **named: Any) -> PacedGeneration:
        """Let the next core serve."""
        run = PacedGeneration(self.clock, *keys, **named)
        run.arrived = self.pacer.arrived
        self.generations.adopt(run)
        return run

    def tick(self, times: int = 1) -> None:
        """Let the next round for all users pass."""
        self.clock.pump([TICK] * times * int(EVERYBODY / TICK))

    def say(self, key: str, limit: Limit) -> None:
        self.limits[key] = limit
        self.pacer.changed([key])
        self.clock.advance(0)

    def test_it_costs_nothing_without_speed_limits(self) -> None:
        self.run_.connect("anna", b"1")
        self.tick(5)
        self.assertEqual(self.run_.looks, [])
        self.assertEqual((self.run_.rates, self.run_.doors), ({b"1": None}, {}))

    def test_new_connections_are_collected_and_share_at_once(self) -> None:
        self.limits["anna"] = TEN
        self.run_.connect("anna", b"1")
        self.clock.advance(GATHER / 2)
        self.run_.connect("anna", b"2")
        self.run_.connect("bert", b"3")
        self.assertEqual(self.run_.looks, [])
        self.clock.advance(GATHER)
        self.assertEqual(self.run_.looks, [{"anna"}])
        self.assertEqual(self.run_.rates, {b"1": 5 * MBIT, b"2": 5 * MBIT, b"3": None})

    def test_busy_connections_get_what_others_leave(self) -> None:
        self.limits["anna"] = TEN
        for number in range(4):
            self.run_.connect("anna", bytes([number]))
        self.run_.move(b"\0", waiting=1)
        self.tick()
        self.assertEqual(self.run_.rates, {b"\0": 10 * MBIT, b"\1": 2.5 * MBIT, b"\2": 2.5 * MBIT, b"\3": 2.5 * MBIT})
        self.run_.move(b"\0", waiting=0)
        self.run_.move(b"\1", sent=10**6)
        self.tick()
        self.assertEqual((self.run_.rates[b"\0"], self.run_.rates[b"\1"]), (2.5 * MBIT, 10 * MBIT))

    def test_only_changed_rates_are_set(self) -> None:
        self.limits["anna"] = TEN
        self.run_.connect("anna", b"1")
        self.tick(4)
        self.assertEqual(self.run_.told, [{b"1": 10 * MBIT}])

    def test_a_limit_is_shared_over_all_cores(self) -> None:
        self.limits["anna"] = TEN
        self.run_.connect("anna", b"1")
        run = self.runs("anna")
        run.connect("anna", b"1")
        self.tick()
        self.assertEqual((self.run_.rates, run.rates), ({b"1": 5 * MBIT}, {b"1": 5 * MBIT}))
        self.generations.gone(self.run_)
        self.tick()
        self.assertEqual(run.rates, {b"1": 10 * MBIT})

    def test_a_changed_limit_is_in_force_at_once(self) -> None:
        self.run_.connect("anna", b"1")
        self.say("anna", TEN)
        self.assertEqual(self.run_.rates, {b"1": 10 * MBIT})
        self.say("anna", FIVE)
        self.assertEqual(self.run_.rates, {b"1": 5 * MBIT})
        self.say("anna", NONE)
        self.assertEqual(self.run_.rates, {b"1": None})
        looks = len(self.run_.looks)
        self.tick(3)
        self.assertEqual(len(self.run_.looks), looks)

    def test_disconnected_users_are_not_checked(self) -> None:
        self.limits["anna"] = TEN
        self.run_.connect("anna", b"1")
        self.run_.disconnect(b"1")
        self.tick()
        looks = len(self.run_.looks)
        self.tick(3)
        self.assertEqual(len(self.run_.looks), looks)

    def test_an_arrival_during_a_round_is_in_the_next_one(self) -> None:
        self.limits |= {"anna": TEN, "bert": FIVE}
        self.run_.connect("anna", b"1")
        see = self.run_.look

        async def look(keys: Any) -> Any:
            if b"2" not in self.run_.flows:
                self.run_.connect("bert", b"2")
                return [live for live in await see(keys) if live.key == "anna"]
            return await see(keys)

        self.run_.look = look  # type: ignore[method-assign]
        self.clock.advance(GATHER)
        self.tick()
        self.assertEqual(self.run_.rates[b"2"], 5 * MBIT)

    def test_a_core_that_does_not_answer_causes_a_warning_and_does_not_block_others(self) -> None:
        self.limits["anna"] = TEN
        self.run_.connect("anna", b"1")
        run = self.runs("anna")
        run.connect("anna", b"2")
        self.run_.blind = True
        self.tick()
        self.assertEqual(run.rates, {b"2": 10 * MBIT})
        self.assertIn("the kernel does not list connections", self.pacer.warnings[0])
        self.run_.blind = False
        self.tick()
        self.assertEqual((self.run_.rates, run.rates), ({b"1": 5 * MBIT}, {b"2": 5 * MBIT}))
        self.assertEqual(self.pacer.warnings, [])

    def test_a_connection_without_a_user_is_released(self) -> None:
        """A reverse proxy's connection, which another user has now."""
        self.limits["anna"] = TEN
        self.run_.connect("anna", b"1")
        self.tick()
        self.run_.move(b"1", key="")
        self.tick()
        self.assertEqual(self.run_.rates, {b"1": None})

    # New connections

    def test_if_all_users_have_a_speed_new_connections_get_the_greatest(self) -> None:
        self.limits |= {"anna": TEN, "bert": FIVE}
        self.tick()
        self.assertEqual(self.run_.doors, {})
        self.say("carl", FIVE)
        self.tick()
        self.assertEqual(self.run_.doors, {"a": 10 * MBIT})
        self.say("anna", FIVE)
        self.tick()
        self.assertEqual(self.run_.doors, {"a": 5 * MBIT})
        self.say("bert", NONE)
        self.tick()
        self.assertEqual(self.run_.doors, {"a": None})

    def test_listeners_that_could_not_be_set_are_tried_again(self) -> None:
        self.limits["anna"] = TEN
        run = self.runs("anna")
        self.clock.advance(0)
        self.assertEqual(run.doors, {"a": 10 * MBIT})
        run.deaf = True
        self.say("anna", NONE)
        self.tick()
        self.assertEqual(run.doors, {"a": 10 * MBIT})
        run.deaf = False
        self.tick()
        self.assertEqual(run.doors, {"a": None})

    def test_a_new_core_is_set_before_users_connect(self) -> None:
        self.limits["anna"] = TEN
        run = self.runs("anna")
        self.clock.advance(0)
        self.assertEqual(run.doors, {"a": 10 * MBIT})

    def test_a_user_without_a_limit_loses_the_pace_of_their_inbound(self) -> None:
        self.limits["anna"] = TEN
        run = self.runs("anna")
        self.clock.advance(0)
        run.accounts["a"]["dora"] = b""
        run.connect("dora", b"1")
        self.assertEqual(run.rates[b"1"], 10 * MBIT)
        self.clock.advance(GATHER)
        self.assertIsNone(run.rates[b"1"])
        self.assertEqual(run.doors, {"a": None})
        # The core may report a connection that it accepted before a while later.
        run.connect("dora", b"2")
        run.rates[b"2"] = 10 * MBIT
        self.tick()
        self.assertIsNone(run.rates[b"2"])
        self.clock.advance(KNOWN)
        looks = len(run.looks)
        run.connect("dora", b"3")
        self.tick()
        self.assertEqual(len(run.looks), looks)

    def test_the_reactor_gets_turns_between_many_users(self) -> None:
        keys = [str(number) for number in range(3 * TURN + 1)]
        self.limits |= dict.fromkeys(keys, TEN)
        run = self.runs(*keys)
        turns: list[float] = []
        later = self.clock.callLater

        def call_later(seconds: float, *work: Any) -> Any:
            turns.append(seconds)
            return later(seconds, *work)

        self.patch(self.clock, "callLater", call_later)
        self.clock.advance(0)
        self.assertEqual((run.doors, turns), ({"a": 10 * MBIT}, [0, 0, 0]))

    def test_an_inbound_with_shared_connections_is_left_alone(self) -> None:
        self.limits["anna"] = TEN
        run = self.runs("anna", paced={"a": "users come by UDP"})
        self.tick()
        self.assertEqual(run.doors, {})
        self.assertEqual(self.pacer.notes("anna"), ["speed is not enforced in inbound 'a': users come by UDP"])
        self.assertEqual(self.pacer.notes("bert"), [])

    def test_a_core_that_cannot_pace_is_in_the_notes(self) -> None:
        self.limits["anna"] = TEN
        self.assertEqual(self.pacer.notes("anna"), [])
        self.generations.adopt(MemoryGeneration(self.clock, MemoryPlan("", ("a",)), {"a": {"anna": b""}}, Gate()))
        self.assertEqual(self.pacer.notes("anna"), ["speed is not enforced: this core's connections cannot be paced"])
        self.pacer.arrived("anna", HERE)
        self.tick()

    # Upload

    def test_windows_follow_what_is_measured_twice_a_second(self) -> None:
        self.limits["anna"] = Limit(up=10_000_000)
        self.run_.connect("anna", b"1")
        self.clock.advance(GATHER)
        self.assertEqual((self.run_.windows, self.run_.rates), ({b"1": 50_000}, {b"1": None}))
        self.clock.advance(TICK - GATHER)
        self.run_.move(b"1", received=int(20 * MBIT * TICK))
        self.clock.advance(TICK)
        self.assertEqual(self.run_.windows, {b"1": int(50_000 * 0.5**0.5)})
        self.assertEqual(self.run_.told, [{b"1": None}])
        self.say("anna", NONE)
        self.assertEqual(self.run_.windows, {b"1": None})

    def test_a_window_is_removed_later_if_the_core_did_not_answer(self) -> None:
        self.limits["anna"] = Limit(up=10_000_000)
        self.run_.connect("anna", b"1")
        # The next tick is one without a round for all users.
        self.clock.pump([TICK] * 3)
        self.run_.blind = True
        self.say("anna", NONE)
        self.run_.blind = False
        self.assertEqual(self.run_.windows, {b"1": 50_000})
        self.tick(2)
        self.assertEqual(self.run_.windows, {b"1": None})

    def test_the_window_of_a_connection_without_a_user_is_removed(self) -> None:
        self.limits["anna"] = Limit(up=10_000_000)
        self.run_.connect("anna", b"1")
        self.tick()
        self.run_.move(b"1", key="")
        self.tick(2)
        self.assertEqual(self.run_.windows, {b"1": None})

    def test_a_user_without_a_limit_is_released_later_if_the_core_did_not_answer(self) -> None:
        self.limits["anna"] = TEN
        run = self.runs("anna")
        self.clock.advance(0)
        run.accounts["a"]["dora"] = b""
        run.connect("dora", b"1")
        run.blind = True
        with capturedLogs() as logged:
            self.clock.advance(GATHER)
        text = "speed limits could not be applied to new connections; the node tries again"
        self.assertEqual(formatEvent(logged[-1]), f"{text}: the kernel does not list connections")
        self.assertEqual(run.rates[b"1"], 10 * MBIT)
        run.blind = False
        self.tick()
        self.assertIsNone(run.rates[b"1"])
