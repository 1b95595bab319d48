"""A core as a child process: its lines, and its end."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet import reactor as installed
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.process import ProcessReader
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from drivers.process import child as process
from drivers.process import spawn as spawning
from drivers.process.child import LAST_LINES, MAX_LINE, CoreProcess, LineSplitter
from drivers.process.orphans import MARK, mark
from drivers.process.spawn import Spawner, in_memory
from node.base.errors import CoreFailed
from node.contract.driver import Done, Exit
from scripts.staging.wait import until
from tests.harness.open_files import open_files

reactor: Any = installed

OWNER = Path(__file__).parents[3]
fcntl_of_the_kernel = fcntl.fcntl


def python(code: str) -> list[str]:
    """A small program as a core."""
    return [sys.executable, "-I", "-S", "-u", "-c", code]


# Lines


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12) | st.just(b"\n") | st.just(b"\r\n"), max_size=30))
def test_lines_do_not_depend_on_how_they_arrive(pieces: list[bytes]) -> None:
    """However the bytes are split, the lines are the same, and none is missing."""
    splitter, whole = LineSplitter(), b"".join(pieces).decode("utf-8", "replace")
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.flush()
    expected = whole.removesuffix("\n").split("\n") if whole else []
    assert [line.rstrip("\r") for line in lines] == [line.rstrip("\r") for line in expected]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3 * MAX_LINE), max_size=5), st.integers(1000, 2 * MAX_LINE))
def test_long_lines_are_cut(lengths: list[int], chunk: int) -> None:
    """A long line loses its end; its neighbours are whole."""
    data = b"".join(b"a" * length + b"\n" for length in lengths) + b"end"
    splitter = LineSplitter()
    lines = [line for start in range(0, len(data), chunk) for line in splitter.feed(data[start : start + chunk])]
    assert [len(line) for line in lines] == [min(length, MAX_LINE) for length in lengths]
    assert splitter.flush() == ["end"]
    assert splitter.flush() == []


# Why a core ended

ACCESS = (
    "2026/11/21 02:17:57.788507 from 203.0.113.7:4711 accepted tcp:a.test:443 [home >> direct] email: anna@test",
    "+0000 2026-11-21 02:17:57 INFO [12 0ms] inbound/vless[home]: [anna@test] inbound connection to a.test:443",
)
TELLING = (
    "panic: runtime error: index out of range [1] with length 1",
    "fatal error: all goroutines are asleep - deadlock!",
    "Failed to start: app/proxyman/inbound: failed to listen TCP on 443",
    "FATAL[0000] start service: listen tcp :443: bind: address already in use",
)


@pytest.mark.parametrize("line", ACCESS)
@pytest.mark.parametrize("code", [-9, -11, 0, 1, 2, 255])
def test_no_reason_is_about_users(line: str, code: int) -> None:
    """However a core ends, the reason has no line about a user."""
    ended = Exit(code, ("started", line))
    assert ended.reason == f"the core ended unexpectedly ({ended.how})"


@pytest.mark.parametrize("line", TELLING)
def test_a_core_says_why_it_ends(line: str) -> None:
    """The last line that explains the end is the reason, whatever lines surround it."""
    for lines in ((line,), (*ACCESS, line), (*TELLING, line, "goroutine 1 [running]:", *ACCESS)):
        assert Exit(2, lines).reason == f"the core ended unexpectedly (exit code 2): {line}"
    # A signal came from outside: an earlier line is not the reason.
    assert Exit(-9, (line,)).reason == "the core ended unexpectedly (signal 9)"


class Spawning(TestCase):
    """Runs small programs under the real reactor."""

    timeout = 20

    def setUp(self) -> None:
        self.lines: list[str] = []

    def take(self, lines: list[str]) -> None:
        self.lines += lines

    def start(
        self, command: Sequence[str], environment: dict[str, str] | None = None, stdin: bytes = b""
    ) -> CoreProcess:
        core = CoreProcess(reactor, self.take)
        with ExitStack() as files:
            Spawner(reactor, OWNER, environment or {}).spawn(core, command, {0: in_memory(stdin, files)})
        self.addCleanup(core.signal, signal.SIGKILL)
        return core

    async def says(self, line: str) -> None:
        while line not in self.lines:
            await deferLater(reactor, 0.005)


class DescriptorTests(Spawning):
    async def test_no_descriptors_for_its_outputs(self) -> None:
        """If the machine runs out of descriptors, none stays open."""
        before = open_files().keys()
        made = [os.memfd_create("test"), OSError(errno.EMFILE, "Too many open files")]
        with mock.patch.object(os, "memfd_create", side_effect=made), self.assertRaises(CoreFailed):
            await Spawner(reactor, OWNER, {}).run(python(""))
        self.assertEqual(open_files().keys(), before)

    def test_no_memory_for_its_input(self) -> None:
        before = open_files().keys()
        full = mock.patch.object(os, "write", side_effect=OSError(errno.ENOSPC, "full"))
        with full, self.assertRaises(CoreFailed), ExitStack() as files:
            in_memory(b"text", files)
        self.assertEqual(open_files().keys(), before)


class CoreProcessTests(Spawning):
    async def test_output_and_exit(self) -> None:
        """Both outputs arrive in lines, also a last one without a newline; the exit has the code and the last lines."""
        code = "import sys; print('out'); print('err', file=sys.stderr); print('last', end=''); sys.exit(3)"
        ended = await self.start(python(code)).when_exited()
        self.assertEqual(sorted(self.lines), ["err", "last", "out"])
        self.assertEqual((ended.code, sorted(ended.lines)), (3, ["err", "last", "out"]))
        self.assertIn("exit code 3", ended.reason)

    async def test_lines_are_gathered(self) -> None:
        """Lines that are written one by one are read many at a time, and none is missing."""
        batches: list[list[str]] = []
        code = "import time\nfor n in range(200):\n print(n)\n time.sleep(0.0005)"
        core = self.start(python(code))
        core._on_lines = batches.append
        ended = await core.when_exited()
        self.assertEqual([line for batch in batches for line in batch], [str(n) for n in range(200)])
        self.assertLess(len(batches), 100)
        self.assertEqual(ended.code, 0)
        self.assertFalse(any(alarm.pending for alarm in core._gathering.values()))

    async def test_much_at_a_time(self) -> None:
        """Lines that wait in the pipe, more of them than Twisted reads at a time, come together."""
        batches: list[list[str]] = []
        lines = ["x" * 99] * 500
        core = self.start(python(f"import os\nos.write(1, b{chr(10).join(lines)!r})\nimport time\ntime.sleep(0.1)"))
        core._on_lines = batches.append
        await core.when_exited()
        self.assertEqual([line for batch in batches for line in batch], lines)
        self.assertLess(len(batches), 3)

    async def test_a_crash(self) -> None:
        """The exit has the signal."""
        core = self.start(python("import os; print('now'); os.kill(os.getpid(), 11)"))
        self.assertIsNotNone(core.pid)
        ended = await core.when_exited()
        self.assertEqual(ended, Exit(-signal.SIGSEGV, ("now",)))
        self.assertEqual(ended.reason, "the core ended unexpectedly (signal 11)")

    async def test_a_clean_end(self) -> None:
        """A process that exits without output has exit code 0; later calls return it, too."""
        core = self.start(python(""))
        self.assertEqual(await core.when_exited(), Exit(0, ()))
        self.assertEqual(await core.when_exited(), Exit(0, ()))
        self.assertEqual(await core.stop(), Exit(0, ()))

    async def test_several_waiters(self) -> None:
        """Each caller has a Deferred of their own; cancelling one does not affect the others."""
        core = self.start(python("input()"), stdin=b"\n")
        one, gone, two = core.when_exited(), core.when_exited(), core.when_exited()
        gone.addErrback(lambda _: None)
        gone.cancel()
        self.assertEqual([(await one).code, (await two).code], [0, 0])

    async def test_a_flood(self) -> None:
        """Ten thousand lines arrive in order, and the exit has only the last ones."""
        ended = await self.start(python("for n in range(10000): print(n, flush=False)")).when_exited()
        self.assertEqual(self.lines, [str(number) for number in range(10_000)])
        self.assertEqual(ended.lines, tuple(str(number) for number in range(10_000 - LAST_LINES, 10_000)))

    async def test_a_line_of_a_mebibyte(self) -> None:
        """A line beyond the limit is cut, and the next one is whole."""
        code = "import sys; sys.stdout.write('x' * (1 << 20) + '\\nnext\\n')"
        await self.start(python(code)).when_exited()
        self.assertEqual(self.lines, ["x" * MAX_LINE, "next"])

    async def test_a_node_that_does_not_read(self) -> None:
        """A core can write much to both outputs while the node is busy, without blocking."""
        with tempfile.TemporaryDirectory() as directory:
            done = Path(directory) / "done"
            line = b"x" * 99 + b"\n"
            code = f"import os; [os.write(n, {line!r} * 9000) for n in (1, 2)]; open({str(done)!r}, 'w').close()"
            core = self.start(python(code))
            # The reactor is blocked meanwhile.
            until(done.exists, 5, "everything is said")
            await core.when_exited()
        self.assertEqual(self.lines, [line.decode().strip()] * 18_000)

    async def test_half_lines(self) -> None:
        """A line that arrives in pieces is one line, and the two outputs do not mix."""
        code = (
            "import os, time\n"
            "for piece in (b'on', b'e\\ntw'): os.write(1, piece); os.write(2, b'err'); time.sleep(0.02)\n"
            "os.write(2, b'or\\n'); os.write(1, b'o\\n')"
        )
        await self.start(python(code)).when_exited()
        self.assertEqual(sorted(self.lines), ["errerror", "one", "two"])

    async def test_odd_bytes(self) -> None:
        """Bytes that are not UTF-8 are replaced, and carriage returns are removed."""
        await self.start(python("import os; os.write(1, b'\\xff\\x00a\\r\\n\\n\\xc3')")).when_exited()
        self.assertEqual(self.lines, ["\ufffd\x00a", "", "\ufffd"])

    async def test_asked_to_end(self) -> None:
        """A process that handles TERM ends by it, with its own last lines."""
        code = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(0)))\n"
            "print('ready'); time.sleep(60)"
        )
        core = self.start(python(code))
        await self.says("ready")
        ended = await core.stop()
        self.assertEqual((ended.code, ended.lines), (0, ("ready", "bye")))
        core.signal(signal.SIGTERM)

    async def test_forced_to_end(self) -> None:
        """A process that ignores TERM is killed after its time, and not before."""
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"
        clock = Clock()
        core = self.start(python(code))
        await self.says("ready")
        self.patch(core._kill, "_reactor", clock)
        stopping = Deferred.fromCoroutine(core.stop())
        clock.advance(process.TERM_SECONDS - 0.01)
        await deferLater(reactor, 0.05)
        self.assertIsNone(core.exit)
        clock.advance(0.02)
        self.assertEqual((await stopping).code, -signal.SIGKILL)
        self.assertEqual(clock.getDelayedCalls(), [])

    async def test_a_clean_environment(self) -> None:
        """A core gets its own environment and the mark, nothing of the node's environment."""
        os.environ["TXNODE_TEST_SECRET"] = "secret"
        self.addCleanup(os.environ.pop, "TXNODE_TEST_SECRET")
        code = "import os; print(sorted((k, v) for k, v in os.environ.items() if k != 'LC_CTYPE'))"
        await self.start(python(code), {"TZ": "UTC"}).when_exited()
        self.assertEqual(self.lines, [str(sorted({"TZ": "UTC", MARK: mark(OWNER)}.items()))])

    async def test_inherited_descriptors(self) -> None:
        """It can read its standard input to the end, and has none of the node's files."""
        kept = os.open(os.devnull, os.O_RDONLY)
        self.addCleanup(os.close, kept)
        code = (
            "import os, sys; print(len(sys.stdin.read())); print(sorted(int(f) for f in os.listdir('/proc/self/fd')))"
        )
        await self.start(python(code), stdin=b"x" * 300_000).when_exited()
        self.assertEqual(self.lines[0], "300000")
        # The fourth belongs to the listing itself.
        self.assertEqual(len(self.lines[1].split(",")), 4)


class RunTests(TestCase):
    """Commands that run to their end."""

    timeout = 20

    async def run_it(self, command: Sequence[str], stdin: bytes = b"", seconds: float = 10) -> Done:
        return await Spawner(reactor, OWNER, {}).run(command, stdin=stdin, seconds=seconds)

    async def test_output_and_lines(self) -> None:
        """Descriptor 3 has the output, stdout and stderr have lines; both are complete."""
        code = "import os, sys; data = sys.stdin.buffer.read(); print('said'); os.write(3, data * 2); sys.exit(5)"
        done = await self.run_it(python(code), stdin=b"ab" * 200_000)
        self.assertEqual((done.code, done.lines, done.output), (5, ("said",), b"ab" * 400_000))

    async def test_one_that_hangs(self) -> None:
        """A command that does not end in time is killed, and the error names it."""
        with self.assertRaises(CoreFailed) as caught:
            await self.run_it(python("import time; time.sleep(60)"), seconds=0.3)
        self.assertIn("within 0.3 s", caught.exception.text)
        while any(isinstance(reader, ProcessReader) for reader in reactor.getReaders()):
            await deferLater(reactor, 0.005)

    async def test_a_cancelled_caller(self) -> None:
        """The command is killed, and leaves nothing open."""
        await self.run_it(python("print('the reactor has its own by now')"))
        before, running = len(open_files()), psutil.Process().children()
        work = ensureDeferred(self.run_it(python("import time; time.sleep(60)")))
        self.assertGreater(len(psutil.Process().children()), len(running))
        work.cancel()
        with self.assertRaises(CancelledError):
            await work
        while len(open_files()) != before or any(one not in running for one in psutil.Process().children()):
            await deferLater(reactor, 0.005)

    async def test_one_that_leaves_another_behind(self) -> None:
        """The outputs of a command that hangs are closed, although a process that it started holds them."""
        await self.run_it(python("print('the reactor has its own by now')"))
        before = len(open_files())
        work = ensureDeferred(self.run_it(["/bin/sh", "-c", "sleep 60 & wait"], seconds=1))
        left: list[psutil.Process] = []
        while not left:
            await deferLater(reactor, 0.005)
            left = [one for one in psutil.Process().children(recursive=True) if one.name() == "sleep"]
        self.addCleanup(left[0].kill)
        with self.assertRaises(CoreFailed):
            await work
        while len(open_files()) != before:
            await deferLater(reactor, 0.005)
        self.assertTrue(left[0].is_running())

    async def test_too_much_output(self) -> None:
        """The output is cut at the limit, and the last lines are kept."""
        with mock.patch.object(spawning, "OUTPUT", 1000):
            done = await self.run_it(python("import os\nwhile True: os.write(3, b'x' * 100)"))
        self.assertEqual((done.code, done.output), (1, b"x" * 1000))
        self.assertEqual(len((await self.run_it(python("for n in range(10_000): print(n)"))).lines), LAST_LINES)

    async def test_a_node_that_may_write_less(self) -> None:
        """A lower limit of the node itself for file sizes stays in force, and the command runs."""
        own = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, own)
        resource.setrlimit(resource.RLIMIT_FSIZE, (spawning.OUTPUT // 2, own[1]))
        done = await self.run_it(python("import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE))"))
        hard = spawning.OUTPUT if own[1] == resource.RLIM_INFINITY else min(own[1], spawning.OUTPUT)
        self.assertEqual(done.lines, (str((spawning.OUTPUT // 2, hard)),))

    async def test_one_that_cannot_be_limited(self) -> None:
        """A command that has started already is ended by the error, which names it."""
        running = psutil.Process().children()
        refused = PermissionError(errno.EPERM, "Operation not permitted")
        with (
            mock.patch.object(resource, "prlimit", side_effect=refused),
            self.assertRaisesRegex(CoreFailed, "cannot be run: .*not permitted"),
        ):
            await self.run_it(python("import time; time.sleep(60)"))
        while any(child not in running for child in psutil.Process().children()):
            await deferLater(reactor, 0.005)

    async def test_a_missing_executable(self) -> None:
        """The error names it."""
        for path in ("/nowhere/core", os.devnull):
            with self.assertRaises(CoreFailed) as caught:
                await self.run_it([path])
            self.assertIn(path, caught.exception.text)

    async def test_nothing_is_left_open(self) -> None:
        """A command leaves no descriptor open, however it ends."""
        await self.run_it(python("print('the reactor has its own by now')"))
        before = open_files()
        for _ in range(3):
            await self.run_it(python("print('x')"))
        self.assertLessEqual(open_files().items(), before.items())


def test_the_largest_pipe_that_the_kernel_allows() -> None:
    """If the kernel refuses a size, half of it is tried, and so on; in the end the pipe stays as it is."""
    for most in (process.PIPE, process.PIPE // 4, 0):
        reader, writer = os.pipe()
        usual = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)

        def limited(pipe: int, command: int, size: int, most: int = most) -> int:
            if size > most:
                raise PermissionError
            return fcntl_of_the_kernel(pipe, command, size)

        try:
            with mock.patch.object(fcntl, "fcntl", limited):
                process.widen(reader)
            assert fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) == max(most, usual)
        finally:
            os.close(reader)
            os.close(writer)


class GoneTests(SynchronousTestCase):
    def test_a_signal_before_the_start(self) -> None:
        """It is ignored: the process does not run yet."""
        CoreProcess(Clock(), lambda _: None).signal(signal.SIGTERM)
