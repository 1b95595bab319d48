"""node.machine.system: rates over real time, percentages within bounds, and values from the first call on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from node.machine.interfaces import Carried
from node.machine.system import Sample, SystemStats, read_sample, reading, since_boot
from protos import service_pb2

SAMPLE = Sample(
    at=100.0,
    cpu_idle=30.0,
    cpu_total=40.0,
    cores=2,
    mem_total=1000,
    mem_available=400,
    uptime=20,
    interfaces={"eth0": Carried(1000, 2000), "eth1": Carried(10, 20)},
)
NEXT = replace(
    SAMPLE,
    at=102.0,
    cpu_idle=31.0,
    cpu_total=44.0,
    uptime=22,
    interfaces={"eth0": Carried(3000, 6000), "eth1": Carried(30, 60)},
)

times = st.floats(0, 1e9)
counters = st.builds(Carried, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
samples = st.builds(
    Sample,
    at=times,
    cpu_idle=times,
    cpu_total=times,
    cores=st.integers(1, 512),
    mem_total=st.just(1000),
    mem_available=st.integers(0, 1000),
    uptime=st.integers(0, 10**9),
    interfaces=st.dictionaries(st.sampled_from(["eth0", "eth1", "wg0"]), counters),
)


def test_rates_are_over_the_time_that_passed() -> None:
    """Bytes of all interfaces are divided by the two seconds between the samples; 3 of 4 core seconds are 75 %."""
    now = reading(SAMPLE, NEXT)
    assert (now.incoming_bandwidth_speed, now.outgoing_bandwidth_speed) == (1010, 2020)
    assert now.cpu_usage == 75.0
    assert (now.mem_total, now.mem_used, now.cpu_cores, now.uptime) == (1000, 600, 2, 22)


def test_a_reset_counter_costs_only_its_own_interface() -> None:
    """An interface whose counter was reset adds nothing for one reading, and takes nothing from the others."""
    reset = replace(NEXT, interfaces={**NEXT.interfaces, "eth1": Carried(0, 0)})
    assert reading(SAMPLE, reset).incoming_bandwidth_speed == 1000


def test_an_interface_that_came_or_went_makes_no_jump() -> None:
    """What an interface counted before it was seen is not traffic of this second."""
    other = replace(NEXT, interfaces={"eth0": NEXT.interfaces["eth0"], "wg0": Carried(10**9, 10**9)})
    assert reading(SAMPLE, other).incoming_bandwidth_speed == 1000


@example(replace(SAMPLE, at=0.0), replace(NEXT, at=5e-324))
@given(samples, samples)
def test_no_pair_of_samples_gives_an_impossible_value(before: Sample, after: Sample) -> None:
    """Whatever the counters do, speeds are not negative and the CPU's usage is 0 to 100 %."""
    now = reading(before, after)
    assert now.incoming_bandwidth_speed >= 0
    assert now.outgoing_bandwidth_speed >= 0
    assert 0 <= now.cpu_usage <= 100


def test_one_sample_is_enough_for_a_reading() -> None:
    """Alone, a sample gives no speeds and the CPU's usage since the machine started."""
    now = since_boot(SAMPLE)
    assert (now.incoming_bandwidth_speed, now.outgoing_bandwidth_speed, now.cpu_usage) == (0, 0, 25.0)


def test_a_reading_of_this_machine() -> None:
    """It fills SystemStatsResponse, but for what needs two samples, and means something."""
    message = since_boot(read_sample())
    speeds = {"cpu_usage", "incoming_bandwidth_speed", "outgoing_bandwidth_speed"}
    filled = {field.name for field, _ in message.ListFields()}
    assert filled | speeds == {field.name for field in service_pb2.SystemStatsResponse.DESCRIPTOR.fields}
    assert 0 < message.mem_used < message.mem_total
    assert message.cpu_cores >= 1
    assert message.uptime > 0
    assert "lo" not in read_sample().interfaces


class SystemStatsTests(SynchronousTestCase):
    """The service, with a clock and samples of the test's own."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.sample: Sample | OSError = SAMPLE
        self.stats = SystemStats(self.clock, self.read)

    def read(self) -> Sample:
        if isinstance(self.sample, OSError):
            raise self.sample
        return self.sample

    def start(self) -> None:
        self.stats.start()
        self.addCleanup(self.stats.stop)

    def test_before_it_runs(self) -> None:
        """Values are there before the service starts."""
        self.assertEqual(self.stats.current(), since_boot(SAMPLE))

    def test_every_second(self) -> None:
        """A second after the start the values come from two samples, and from then on from the last two."""
        self.start()
        self.sample = NEXT
        self.clock.advance(1)
        self.assertEqual(self.stats.current(), reading(SAMPLE, NEXT))
        self.sample = replace(NEXT, at=103.0)
        self.clock.advance(1)
        self.assertEqual(self.stats.current().incoming_bandwidth_speed, 0)

    def test_a_failing_reading(self) -> None:
        """While the counters cannot be read the last values stay, and the log says so once; then it goes on."""
        self.start()
        self.sample = OSError("too many open files")
        with capturedLogs() as logged:
            self.clock.pump([1, 1, 1])
        self.assertEqual(self.stats.current(), since_boot(SAMPLE))
        self.assertEqual(len(logged), 1)
        self.flushLoggedErrors(OSError)
        [warning] = self.stats.warnings
        self.assertIn("too many open files", warning)
        self.sample = NEXT
        self.clock.advance(1)
        self.assertEqual(self.stats.current(), reading(SAMPLE, NEXT))
        self.assertEqual(self.stats.warnings, [])

    def test_stopped(self) -> None:
        """A stopped service leaves no timer behind."""
        self.stats.start()
        self.stats.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])
