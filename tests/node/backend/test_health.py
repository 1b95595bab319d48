"""Health checks: a core that answers is left alone, one that hangs is reported, users are repaired."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from drivers.pretended.scripted import Gate, MemoryGeneration, MemoryPlan
from node.backend.health import AGAIN, AUDIT, INTERVAL, PATIENCE, Watch
from node.base.errors import CoreFailed
from node.contract.accounts import Accounts
from node.contract.driver import Generation


def one_more(accounts: dict[str, Accounts]) -> int:
    accounts["a"]["stranger"] = b"who"
    return 1


class WatchTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.hung: list[tuple[float, str]] = []
        self.repaired: list[Generation] = []
        self.fault: Exception | None = None
        self.core = MemoryGeneration(self.clock, MemoryPlan("a", ("a",)), {"a": {}}, Gate())
        self.watch = Watch(self.clock, self._hung, self._repair)
        self.watch.begin(self.core)

    def _hung(self, generation: Generation, reason: str) -> None:
        self.hung.append((self.clock.seconds(), reason))
        generation.kill()

    async def _repair(self, generation: Generation) -> None:
        self.repaired.append(generation)
        if self.fault:
            raise self.fault

    def pass_time(self, seconds: float) -> None:
        self.clock.pump([0.25] * int(seconds * 4))

    def test_a_core_that_answers(self) -> None:
        """A core that answers is checked on and on, and nothing else happens to it."""
        self.pass_time(600)
        self.assertEqual(self.hung, [])
        self.assertEqual(self.core.asked, 600 // INTERVAL)
        self.assertEqual(self.core.audited, 600 // AUDIT)

    def test_a_core_that_hangs(self) -> None:
        """A core that does not answer for so long is reported once, with the time."""
        self.pass_time(60)
        self.core.silent = True
        self.pass_time(60)
        [(when, reason)] = self.hung
        self.assertLessEqual(when, 60 + INTERVAL + PATIENCE + AGAIN)
        self.assertIn(f"{PATIENCE:g} s", reason)

    def test_a_core_that_was_busy(self) -> None:
        """A core that answers in time is left alone, and its users are audited at once."""
        self.core.silent = True
        self.pass_time(INTERVAL + PATIENCE - 2)
        self.core.silent = False
        self.assertEqual(self.core.audited, 0)
        self.pass_time(INTERVAL)
        self.assertEqual((self.hung, self.core.audited), ([], 1))

    def test_a_connection_that_broke(self) -> None:
        """A refused connection is no verdict: it is asked again until the timeout; then its users are audited."""
        asked = []

        async def refuses(seconds: float) -> bool:
            asked.append(seconds)
            return len(asked) > 3

        self.core.answers = refuses  # type: ignore[method-assign]
        self.pass_time(INTERVAL + 3 * AGAIN + 1)
        self.assertEqual(self.hung, [])
        self.assertEqual(len(asked), 4)
        self.assertEqual(sorted(asked, reverse=True), asked)
        self.assertEqual(self.core.audited, 1)

    def test_a_connection_that_stays_broken(self) -> None:
        """A core that refuses connections for the whole time counts as hung."""
        self.core.silent = True

        async def refuses(seconds: float) -> bool:
            return False

        self.core.answers = refuses  # type: ignore[method-assign]
        self.pass_time(INTERVAL + PATIENCE - 1)
        self.assertEqual(self.hung, [])
        self.pass_time(2)
        self.assertEqual(len(self.hung), 1)

    def test_a_core_that_ended(self) -> None:
        """A core that is gone is not asked, and not reported as hung."""
        self.core.silent = True
        self.pass_time(INTERVAL + 1)
        self.core.die()
        asked = self.core.asked
        self.pass_time(600)
        self.assertEqual((self.core.asked, self.core.audited, self.hung), (asked, 0, []))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_users(self) -> None:
        """At each audit the wanted users are restored, even if the core's users are those that it confirmed."""
        self.core.audits = [lambda _: 0, one_more]
        for looks in (1, 2):
            self.pass_time(AUDIT)
            self.assertEqual(self.repaired, [self.core] * looks)

    def test_a_comparison_that_fails(self) -> None:
        """A core that does not list its users, or a repair that fails, is audited again the next time."""
        self.fault = CoreFailed("no")
        self.core.audits = [CoreFailed("no"), one_more, one_more]
        self.pass_time(3 * AUDIT)
        self.assertEqual((self.core.audited, len(self.repaired)), (3, 3))

    def test_an_unforeseen_fault(self) -> None:
        """Whatever goes wrong with one check, the next ones come, of health and of users."""
        self.fault = KeyError("x")
        self.core.audits = [lambda _: 1 // 0]
        self.pass_time(3 * AUDIT)
        self.assertEqual((self.core.audited, len(self.repaired)), (3, 2))
        # Logged once for each kind, not each time.
        self.assertEqual(len(self.flushLoggedErrors(KeyError, ZeroDivisionError)), 2)
        self.core.silent = True
        self.pass_time(INTERVAL + PATIENCE + AGAIN)
        self.assertEqual(len(self.hung), 1)

    def test_doubt(self) -> None:
        """When the core answers again its users are audited, once for all doubts; a later doubt counts again."""
        for _ in range(2):
            self.core.audited, self.repaired = 0, []
            self.core.silent = True
            for _ in range(3):
                self.watch.doubt(self.core)
            self.pass_time(2)
            self.assertEqual(self.core.audited, 0)
            self.core.silent = False
            self.pass_time(0.25)
            self.assertEqual((self.core.audited, self.repaired), (1, [self.core]))

    def test_a_doubtful_core_that_hangs(self) -> None:
        """It is reported, and nothing is left to do."""
        self.core.silent = True
        self.watch.doubt(self.core)
        self.pass_time(PATIENCE + AGAIN)
        self.assertEqual((len(self.hung), self.clock.getDelayedCalls()), (1, []))

    def test_an_internal_error_while_in_doubt(self) -> None:
        """The watch goes on: the error is logged, and the next check comes."""

        def fail(_: object) -> int:
            raise KeyError("odd")

        async def broken(seconds: float) -> bool:
            self.core.asked += 1
            raise CancelledError

        self.core.audits = [fail, one_more]
        answers, self.core.answers = self.core.answers, broken  # type: ignore[method-assign]
        self.pass_time(AUDIT)
        self.assertEqual(len(self.watch.warnings), 2)
        self.assertEqual(len(self.flushLoggedErrors(KeyError, CancelledError)), 2)
        self.assertEqual(self.core.asked, AUDIT // INTERVAL)
        self.core.answers = answers  # type: ignore[method-assign]
        self.pass_time(AUDIT)
        self.assertEqual(self.watch.warnings, [])
        self.assertEqual((self.repaired, self.hung), ([self.core], []))
        self.fault = ValueError("odd")
        self.core.audits = [one_more]
        self.pass_time(AUDIT)
        self.assertEqual(len(self.watch.warnings), 1)
        self.flushLoggedErrors(ValueError)
        self.core.die()
        self.assertEqual(self.watch.warnings, [])
