"""The keeper as a process, above nodes that do what a test asks for."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node.handover import keeper
from node.handover.keeper import FAILED, FEW, FORWARDED, STATE, VARIABLE, VERSION, WAITING
from scripts.staging.process import tied
from scripts.staging.wait import until
from tests.harness.open_files import room_for

SCRIPT = keeper.__file__
# A node: it sends its sockets to the test and what it knows, then the signals that it gets, and ends as it is asked to,
# by a signal for a negative number. With a file at the second path it ends at once.
NODE = """
import json, os, select, signal, socket, sys

def end(text):
    code = int(text)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -9 else None
        os.kill(os.getpid(), -code)
    os._exit(code)

name, path, *rest = sys.argv[1:]
if os.path.exists(path):
    end(open(path).read())
ask, events, parent = map(int, os.environ["TXNODE_KEEPER"].split())
there = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
# A handler alone would run late for a signal that comes just before a call that waits.
came, comes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
signal.set_wakeup_fd(comes)
for number in signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda *_: None)
try:
    there.connect("\\0" + name)
    about = {"pid": os.getpid(), "parent": parent, "blocked": blocked, "rest": rest, "environment": dict(os.environ)}
    socket.send_fds(there, [json.dumps(about).encode()], [ask, events])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    while there not in select.select([there, came], (), ())[0]:
        for number in os.read(came, 100):
            there.send(b"%d" % number)
    end(there.recv(100) or 98)
except OSError:
    os._exit(98)
"""
# In a node's process before it is one: it gets its keeper as `twistd node` does.
DIVIDES = f"""
import sys
sys.path.append({str(Path(SCRIPT).parents[2])!r})
from node.handover import keeper, launch
"""
# How long anything may take, on a busy machine.
SECONDS = 30.0
PYTHON = [sys.executable, "-I", "-S"]
# In the environment of processes that a test looks for.
MARK = f"{os.getpid()}"
ECHO = "echo out; echo err >&2; exec sleep 100"


def ready(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether a descriptor is readable; a pidfd is, when the process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Core(NamedTuple):
    pid: int
    pidfd: int
    out: int
    err: int

    @property
    def ended(self) -> bool:
        return ready(self.pidfd)

    @property
    def open_files(self) -> Mapping[int, str]:
        """Its descriptors, once it is what it executes."""
        there = Path(f"/proc/{self.pid}/fd")
        return {int(each.name): str(each.readlink()) for each in there.iterdir()}

    def is_executed(self) -> bool:
        return b"python" not in Path(f"/proc/{self.pid}/cmdline").read_bytes()


class Held(NamedTuple):
    """The answer to `hello`."""

    version: int
    exits: Mapping[int, int]
    by_name: Mapping[str, Sequence[int]]

    def core(self, pid: int) -> Core:
        return Core(pid, *self.by_name[f"core/{pid}"])


class Node:
    """A node of the keeper, whose sockets the test uses. What it receives is closed with `stack`."""

    def __init__(self, there: socket.socket, stack: ExitStack) -> None:
        self._stack = stack
        self._there = stack.enter_context(there)
        there.settimeout(SECONDS)
        words, sockets, *_ = socket.recv_fds(there, 1 << 16, 2)
        about = json.loads(words)
        self.pid, self.parent, self.rest = about["pid"], about["parent"], about["rest"]
        self.blocked: set[int] = set(about["blocked"])
        self.environment: Mapping[str, str] = about["environment"]
        self.ask, self.events = (stack.enter_context(socket.socket(fileno=number)) for number in sockets)
        for each in (self.ask, self.events):
            each.settimeout(SECONDS)
        self.pidfd = self._closed(os.pidfd_open(self.pid))
        self.asked = 0

    def _closed(self, *descriptors: int) -> int:
        for descriptor in descriptors:
            self._stack.callback(os.close, descriptor)
        return descriptors[0] if descriptors else -1

    @property
    def ended(self) -> bool:
        return ready(self.pidfd)

    def send(self, what: str, descriptors: Sequence[int] = (), **message: object) -> None:
        self.asked += 1
        while len(descriptors) > FEW:
            socket.send_fds(self.ask, [b'{"more": true}'], descriptors[:FEW])
            descriptors = descriptors[FEW:]
        socket.send_fds(self.ask, [json.dumps({"do": what, "n": self.asked, **message}).encode()], descriptors)

    def receive(self) -> tuple[Any, list[int]]:
        """The answer to the last request."""
        found: list[int] = []
        while True:
            words, some, *_ = socket.recv_fds(self.ask, keeper.MESSAGE, FEW)
            self._closed(*some)
            found += some
            reply = json.loads(words)
            if "more" not in reply:
                assert reply["n"] == self.asked
                return reply, found
            assert len(some) == FEW

    def request(self, what: str, descriptors: Sequence[int] = (), **message: object) -> tuple[Any, list[int]]:
        self.send(what, descriptors, **message)
        return self.receive()

    def hello(self) -> Held:
        self.send("hello")
        return self.greeted()

    def greeted(self) -> Held:
        reply, descriptors = self.receive()
        found = {}
        for name, many in reply["names"]:
            found[name], descriptors = descriptors[:many], descriptors[many:]
        assert not descriptors
        return Held(reply["version"], {int(pid): status for pid, status in reply["exits"].items()}, found)

    def up(self, seconds: float = 300.0) -> Held:
        """Come up, and return what was held."""
        found = self.hello()
        self.request("up", seconds=seconds)
        return found

    def spawn(self, *argv: str, targets: Mapping[int, int] | None = None, **environment: str) -> Core:
        with Path(os.devnull).open() as null:
            given = {0: null.fileno(), **(targets or {})}
            message = {"argv": argv, "environment": environment, "targets": [*given]}
            reply, descriptors = self.request("spawn", [*given.values()], **message)
        return Core(reply["pid"], *descriptors)

    def sleeper(self) -> Core:
        return self.spawn("/bin/sleep", "100")

    def put(self, name: str, content: bytes) -> None:
        memory = os.memfd_create(name)
        os.write(memory, content)
        self.request("put", [memory], name=name)
        os.close(memory)

    def event(self) -> Any:
        return json.loads(self.events.recv(keeper.MESSAGE))

    def signal(self) -> int:
        """The next signal that it gets."""
        return int(self._there.recv(100))

    def has_signal(self) -> bool:
        return ready(self._there.fileno())

    def end(self, code: int) -> None:
        self._there.send(str(code).encode())
        self.gone()

    def die(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.gone()

    def gone(self) -> None:
        assert ready(self.pidfd, SECONDS), "the node did not end"


class Kept:
    """A running keeper. `path`: a file with an exit status, for nodes that end at once.

    With `before`, the first node is there before: its process does this, then becomes the keeper and the node.
    """

    def __init__(
        self,
        directory: Path,
        stack: ExitStack,
        script: Sequence[str] = (SCRIPT,),
        before: str | None = None,
        **environment: str,
    ) -> None:
        self.stack = stack
        self._listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listening.bind("")
        self._listening.listen()
        self._listening.settimeout(SECONDS)
        self.path, self._lines, node = directory / "code", directory / "lines", directory / "twistd"
        self.path.unlink(missing_ok=True)
        node.write_text(NODE if before is None else f"{DIVIDES}{before}\nlaunch.become_keeper()\n{NODE}")
        name = self._listening.getsockname()[1:].decode()
        self.command = [*PYTHON, str(node), name, str(self.path)]
        if before is not None:
            self.command += ["--nodaemon", "node"]
            script = ()
        with self._lines.open("wb") as lines:
            clean = {key: value for key, value in os.environ.items() if not key.startswith(("TXNODE", "NOTIFY"))}
            self.process = tied(
                [*(PYTHON if script else ()), *script, *self.command],
                stderr=lines,
                env={**clean, **environment},
                stdin=subprocess.DEVNULL,
            )
        stack.callback(self._end)
        self.seen: list[Node | Core] = []

    def node(self) -> Node:
        """The next node that begins."""
        there, _ = self._listening.accept()
        found = Node(there, self.stack)
        self.seen.append(found)
        assert found.parent == self.process.pid
        return found

    def next(self, node: Node, word: str = "next", patience: float = 60.0) -> None:
        """Have a node start another version, with its command and a way back that differ by a word."""
        command = {"NEXT": word}, [*self.command, word]
        node.request(
            "next", command=command, plain=command, back=({"BACK": "yes"}, [*self.command, "back"]), patience=patience
        )

    def two(self, waits: bool = False) -> tuple[Node, Node]:
        """A node that serves, and its next version, which may wait for its end."""
        old = self.node()
        old.up()
        self.next(old)
        new = self.node()
        if waits:
            new.send("hello")
            assert old.event() == {"next": ""}
        return old, new

    def spawn(self, node: Node, *argv: str, targets: Mapping[int, int] | None = None, **environment: str) -> Core:
        """Have a core started that must have ended when the test has."""
        core = node.spawn(*argv, targets=targets, **environment)
        self.seen.append(core)
        return core

    @property
    def lines(self) -> str:
        return self._lines.read_text()

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The keeper does nothing inside, as on a very busy machine."""
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        until(lambda: all(each.ended for each in self.seen), SECONDS, "nodes and cores end with the keeper")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def kept(tmp_path: Path, stack: ExitStack) -> Kept:
    return Kept(tmp_path, stack)


def content(memory: int) -> bytes:
    return os.pread(memory, 1 << 20, 0)


# The node's death


def test_the_first_node_fails(kept: Kept) -> None:
    """It is not started again, as its settings may be wrong: the keeper ends with its status."""
    kept.node().end(3)
    assert kept.wait() == 3


def test_the_first_node_is_killed(kept: Kept) -> None:
    """That is no fault of its settings: it is started again."""
    kept.node().die()
    assert kept.node().hello() == Held(VERSION, {}, {})


def test_a_command_that_is_missing(tmp_path: Path) -> None:
    """The keeper says which one, and ends as a shell does."""
    for path, code in (tmp_path / "gone", 127), (tmp_path, 126):
        found = subprocess.run([*PYTHON, SCRIPT, str(path)], capture_output=True, text=True, check=False)
        assert found.returncode == code and f"cannot run {path}: " in found.stderr


def test_a_killed_node(kept: Kept) -> None:
    """The next one gets all descriptors by their names, the exit statuses, and the outputs of cores as they are."""
    first = kept.node()
    assert first.up() == Held(VERSION, {}, {})
    first.put("state", b"old")
    first.put("state", b"new")
    first.put("gone", b"")
    first.request("drop", names=["gone", "unknown"])
    over = kept.spawn(first, "/bin/sh", "-c", "echo last words; exit 7")
    core = kept.spawn(first, "/bin/sh", "-c", ECHO)
    assert first.event() == {"exited": over.pid, "status": 7 << 8}
    assert ready(core.err, SECONDS)
    first.die()
    second = kept.node()
    found = second.up()
    assert (found.exits, {*found.by_name}) == ({over.pid: 7 << 8}, {"state", f"core/{over.pid}", f"core/{core.pid}"})
    assert content(*found.by_name["state"]) == b"new"
    assert os.read(found.core(over.pid).out, 100) == b"last words\n" and found.core(over.pid).ended
    again = found.core(core.pid)
    assert (os.read(again.out, 100), os.read(again.err, 100), again.ended) == (b"out\n", b"err\n", False)
    assert not os.get_blocking(again.out) and not os.get_blocking(again.err)
    signal.pidfd_send_signal(again.pidfd, signal.SIGTERM)
    assert second.event() == {"exited": core.pid, "status": signal.SIGTERM}
    assert f"node {first.pid}: it ended by signal 9; cores go on" in kept.lines


def test_a_core_that_ends_while_no_node_lives(kept: Kept) -> None:
    """The next node gets its exact status, whether it exited or a signal ended it."""
    first, (there, its) = kept.node(), os.pipe()
    first.up()
    exits = kept.spawn(first, "/bin/sh", "-c", "read x; exit 5", targets={0: there})
    killed = kept.spawn(first, "/bin/sleep", "100")
    os.close(there)
    with kept.stopped():
        first.die()
        os.close(its)
        signal.pidfd_send_signal(killed.pidfd, signal.SIGSEGV)
        for core in (exits, killed):
            assert ready(core.pidfd, SECONDS)
    exit_statuses = {pid: status & 0x7F or status for pid, status in kept.node().hello().exits.items()}
    assert exit_statuses == {exits.pid: 5 << 8, killed.pid: signal.SIGSEGV}


def test_forgotten_cores(kept: Kept) -> None:
    """One that runs is killed, without an event, and the next node does not learn of it."""
    first = kept.node()
    first.up()
    over, runs, stays = (kept.spawn(first, "/bin/sh", "-c", words) for words in ("exit 1", ECHO, ECHO))
    assert first.event()["exited"] == over.pid
    for core in (over, runs):
        first.request("forget", pid=core.pid)
    first.request("forget", pid=1)
    assert ready(runs.pidfd, SECONDS)
    os.kill(stays.pid, signal.SIGKILL)
    assert first.event()["exited"] == stays.pid
    first.die()
    assert {*kept.node().hello().by_name} == {f"core/{stays.pid}"}


def test_signals_wait_for_handlers(kept: Kept) -> None:
    """A node has no handlers at first: those that would end it are blocked, the orderly ones if there are cores."""
    first = kept.node()
    assert first.blocked == {*WAITING[:2]} and VARIABLE in first.environment and FAILED not in first.environment
    first.up()
    first.sleeper()
    first.die()
    assert kept.node().blocked == {*WAITING}


def test_a_node_that_hangs(tmp_path: Path, stack: ExitStack) -> None:
    """It is killed and started again, and its cores go on; signs of life prevent it."""
    kept = Kept(tmp_path, stack, WATCHDOG_USEC="900000")
    first = kept.node()
    first.up()
    core = kept.spawn(first, "/bin/sleep", "100")
    first.gone()
    second = kept.node()
    assert f"core/{core.pid}" in second.up().by_name and not core.ended
    assert f"node {first.pid}: it did not answer within 0.6 s; cores go on" in kept.lines
    # It may take its time to end in order.
    second.request("bye")
    second.request("forget", pid=core.pid)
    assert not ready(second.pidfd, 1.0)
    second.end(0)
    assert kept.wait() == 0


# The keeper, for which a machine that stood still for so long was suspended.
SUSPENDED = f"""
import sys
sys.path.append({str(Path(SCRIPT).parent)!r})
import keeper

keeper.STOOD = 1.5  # it looks at least once a second
keeper.main()
"""


def test_a_machine_that_was_suspended(tmp_path: Path, stack: ExitStack) -> None:
    """That time is no silence of the node."""
    kept = Kept(tmp_path, stack, ("-c", SUSPENDED), WATCHDOG_USEC="3000000")
    node = kept.node()
    node.up()
    with kept.stopped():
        assert not ready(node.pidfd, 2.6)
    assert not ready(node.pidfd, 0.1)
    node.request("alive")
    assert "killed" not in kept.lines


def test_a_node_that_does_not_read(kept: Kept) -> None:
    """The keeper never waits for it: it is killed when its events fill the socket, and started again."""
    first = kept.node()
    first.up()
    first.ask.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, keeper.MESSAGE)
    size = first.ask.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
    other = first
    with suppress(ConnectionError):
        for _ in range(100):
            kept.next(first)
            other = kept.node()
            first.request("cancel", reason="x" * size)
            other.gone()
    first.gone()
    assert "it does not read" in kept.lines
    # If another version was started meanwhile, it goes on.
    after = kept.node() if other.ended else other
    assert after.hello().version == VERSION


def test_the_key_for_controllers(tmp_path: Path, stack: ExitStack) -> None:
    """Every node has it from the environment, and /proc shows it of none, nor of the keeper or its own next version."""
    key = "the-key-of-this-test"
    kept = Kept(tmp_path, stack, before="", API_KEY=key, API_KEY_FILE="is-no-secret")

    def shows(pid: int) -> bool:
        shown = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"API_KEY_FILE=is-no-secret" in shown and shown[-1] == b""
        return any(key.encode() in each for each in shown)

    node = kept.node()
    for _ in "first", "next":
        assert node.environment["API_KEY"] == key and not shows(node.pid)
        # It is a keeper already when it answers.
        node.up()
        assert not shows(kept.process.pid)
        node.die()
        node = kept.node()
    node.up()
    other = tmp_path / "other.py"
    other.write_text(Path(SCRIPT).read_text().replace(f"\nVERSION = {VERSION}\n", "\nVERSION = 1002\n"))
    node.request("become", argv=[*PYTHON, str(other)])
    node.request("forget", pid=1)
    assert str(other).encode() in Path(f"/proc/{kept.process.pid}/cmdline").read_bytes()
    assert not shows(kept.process.pid)
    node.die()
    assert kept.node().environment["API_KEY"] == key


# The end


@pytest.mark.parametrize("code", [0, 5, -signal.SIGTERM, -signal.SIGKILL])
def test_the_end_in_order(code: int, kept: Kept) -> None:
    """After `bye` all ends with the node, and as the node: cores are killed, nothing is started again."""
    node = kept.node()
    node.up()
    core = kept.spawn(node, "/bin/sleep", "100")
    node.request("bye")
    node.end(code)
    assert kept.wait() == code
    assert ready(core.pidfd, SECONDS)
    assert "Traceback" not in kept.lines


@pytest.mark.parametrize("number", FORWARDED)
def test_signals_are_forwarded(number: signal.Signals, kept: Kept) -> None:
    """The node handles them; the keeper goes on as long as the node does."""
    node = kept.node()
    node.up()
    kept.process.send_signal(number)
    assert node.signal() == number
    node.request("alive")
    node.end(0)
    if number in (signal.SIGTERM, signal.SIGINT):
        # It had no time to say `bye`.
        assert kept.wait() == 0
    else:
        kept.node()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_while_no_node_runs(number: signal.Signals, kept: Kept) -> None:
    """In the pause after a node that has ended again and again, the keeper ends its cores and itself."""
    first = kept.node()
    first.up()
    core = kept.spawn(first, "/bin/sleep", "100")
    kept.path.write_text("4")
    first.die()
    # The pauses get longer.
    until(lambda: kept.lines.count("starts again") == 4, SECONDS, "four nodes have ended")
    kept.process.send_signal(number)
    assert kept.wait() == -number
    assert ready(core.pidfd, SECONDS)


def test_nodes_are_started_again_and_again(kept: Kept) -> None:
    """With pauses that begin from the shortest again when one has come up."""
    first = kept.node()
    first.up()
    kept.path.write_text("-9")
    first.die()
    until(lambda: kept.lines.count("starts again") == 3, SECONDS, "three nodes have ended")
    kept.path.unlink()
    second = kept.node()
    assert second.hello().version == VERSION
    second.end(7)
    third = kept.node()
    third.up()
    third.die()
    assert kept.node().hello().version == VERSION


def test_no_node_comes_up(kept: Kept) -> None:
    """After `seconds` without any node the cores end, and the keeper ends as the last node did."""
    first = kept.node()
    first.up(seconds=0.3)
    core = kept.spawn(first, "/bin/sleep", "100")
    kept.path.write_text("4")
    first.die()
    assert kept.wait() == 4
    assert ready(core.pidfd, SECONDS)
    assert "no node came up within 0.3 s: all cores end" in kept.lines


def test_a_node_on_its_way(kept: Kept) -> None:
    """The time without any node does not pass while one starts, however long it takes."""
    first = kept.node()
    first.up(seconds=0.2)
    core = kept.spawn(first, "/bin/sleep", "100")
    first.die()
    second = kept.node()
    assert not ready(core.pidfd, 0.5)
    assert f"core/{core.pid}" in second.up(seconds=0.2).by_name


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_keeper(stopped: bool, kept: Kept) -> None:
    """The kernel ends the nodes and the cores with it."""
    node = kept.node()
    node.up()
    cores = [kept.spawn(node, "/bin/sleep", "100") for _ in range(3)]
    kept.next(node)
    other = kept.node()
    kept.process.send_signal(signal.SIGSTOP if stopped else 0)
    kept.process.kill()
    for pidfd in (node.pidfd, other.pidfd, *(core.pidfd for core in cores)):
        assert ready(pidfd, SECONDS)


# A message of each word of the protocol. The last one is the next version's.
WORDS: Mapping[str, Mapping[str, object]] = {
    "spawn": {"argv": ["/bin/sleep", "100"], "environment": {"MARK": MARK}, "targets": []},
    "put": {"name": "state"},
    "drop": {"names": ["name"]},
    "forget": {"pid": "core"},
    "up": {"seconds": 300.0},
    "alive": {"text": "READY=1"},
    "next": {"command": "again", "plain": "again", "back": "again", "patience": 60.0},
    "cancel": {"reason": "a Start came"},
    "failed": {"reason": "it cannot go on"},
    "bye": {},
    "become": {"argv": [*PYTHON, SCRIPT]},
    "hello": {},
}


@pytest.mark.parametrize("moment", ["before", "within", "after"])
@pytest.mark.parametrize("word", WORDS)
def test_it_is_killed_at_every_word(word: str, moment: str, tmp_path: Path, stack: ExitStack) -> None:
    """Before it takes the request, while it works on it, or when it has answered: nothing is left behind."""
    kept = Kept(tmp_path, stack, MARK=MARK)
    node = kept.node()
    node.up()
    core = kept.spawn(node, "/bin/sleep", "100", MARK=MARK)
    node.put("name", b"it")
    if word in ("cancel", "hello"):
        kept.next(node)
        kept.node()
    stands_for = {"core": core.pid, "again": ({}, kept.command)}
    message = {
        key: stands_for.get(value, value) if isinstance(value, str) else value for key, value in WORDS[word].items()
    }
    speaker = kept.seen[-1] if word == "hello" else node
    assert isinstance(speaker, Node)
    if moment == "before":
        kept.process.send_signal(signal.SIGSTOP)
    with Path(os.devnull).open() as null:
        speaker.send(word, [null.fileno()] if word == "put" else [], **message)
    if moment == "after" and word not in ("failed", "hello"):
        speaker.receive()
    if moment == "after" and word == "hello":
        assert node.event() == {"next": ""}
    kept.process.kill()
    kept.process.wait()
    until(lambda: not marked(), SECONDS, "all processes end")


def marked() -> Sequence[int]:
    """Processes of the keeper, known to the test or not."""
    found = []
    for there in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"MARK={MARK}".encode() in (there / "environ").read_bytes().split(b"\0"):
                found.append(int(there.name))
    return found


# Upgrades


def test_the_next_version(kept: Kept) -> None:
    """It waits in `hello` until the version before has ended, and gets all that this one has put until then."""
    old = kept.node()
    old.up()
    core = kept.spawn(old, "/bin/sleep", "100")
    kept.next(old)
    new = kept.node()
    assert new.rest == ["next"] and new.environment["NEXT"] == "next"
    new.send("hello")
    assert old.event() == {"next": ""}
    old.put("state", b"at last")
    assert not ready(new.ask.fileno())
    old.end(0)
    found = new.greeted()
    assert content(*found.by_name["state"]) == b"at last" and not found.core(core.pid).ended
    new.request("up", seconds=300.0)
    os.kill(core.pid, signal.SIGKILL)
    assert new.event()["exited"] == core.pid
    # It is the one to start again.
    new.end(0)
    after = kept.node()
    assert after.rest == ["next"] and FAILED not in after.environment and "BACK" not in after.environment


@pytest.mark.parametrize(("code", "reason"), [(3, "it ended with exit status 3"), (-9, "it ended by signal 9")])
def test_it_ends_before(code: int, reason: str, kept: Kept) -> None:
    """The version that runs gets the reason, and goes on."""
    old = kept.node()
    old.up()
    kept.next(old)
    kept.node().end(code)
    assert old.event() == {"next": reason}
    old.request("alive")
    kept.next(old, "another")
    another = kept.node()
    # As the version that cannot be imported does.
    another.send("failed", reason="ImportError: no")
    another.gone()
    assert old.event() == {"next": "ImportError: no"}
    old.request("next", command=({}, ["/this/is/missing"]), plain=({}, ["x"]), back=({}, kept.command), patience=60.0)
    assert old.event() == {"next": "it ended with exit status 127"}
    old.die()
    again = kept.node()
    assert again.rest == [] and FAILED not in again.environment


def test_it_takes_too_long(kept: Kept) -> None:
    """It has to ask for what is held within its patience, which does not pass while it waits."""
    old = kept.node()
    old.up()
    kept.next(old, patience=0.2)
    new = kept.node()
    new.gone()
    assert old.event() == {"next": "it did not come up within 0.2 s"}
    kept.next(old, patience=SECONDS)
    new = kept.node()
    new.send("hello")
    assert old.event() == {"next": ""}
    old.end(0)
    new.greeted()


@pytest.mark.parametrize("waits", [False, True])
def test_it_is_cancelled(waits: bool, kept: Kept) -> None:
    """The version that runs has changed its mind; without another version that changes nothing."""
    old, new = kept.two(waits)
    old.request("cancel", reason="a Start came")
    new.gone()
    assert old.event() == {"next": "a Start came"}
    old.request("cancel", reason="again")
    old.die()
    assert kept.node().rest == []


@pytest.mark.parametrize("waits", [False, True])
def test_both_versions_are_killed(waits: bool, kept: Kept) -> None:
    """The next one never goes on, whichever is reaped first: the version that ran is started again, as ever."""
    old, new = kept.two(waits)
    with kept.stopped():
        old.die()
        new.die()
    again = kept.node()
    assert again.rest == [] and FAILED not in again.environment


def test_a_death_right_after_it_is_cancelled(kept: Kept) -> None:
    """The next version may still be ending: it does not go on."""
    old = kept.node()
    old.up()
    kept.next(old)
    kept.node()
    old.request("cancel", reason="a Start came")
    old.die()
    again = kept.node()
    assert again.rest == [] and FAILED not in again.environment


def test_another_next_version(kept: Kept) -> None:
    """It takes the place of the first one, whose end is no news then."""
    old = kept.node()
    old.up()
    kept.next(old)
    first = kept.node()
    kept.next(old, "another")
    first.gone()
    another = kept.node()
    another.send("hello")
    assert old.event() == {"next": ""}
    old.end(0)
    another.greeted()


def dies(new: Node) -> str:
    new.end(6)
    return "it ended with exit status 6"


def fails(new: Node) -> str:
    new.send("failed", reason="it cannot go on with the core")
    return "it cannot go on with the core"


def hangs(new: Node) -> str:
    return "it did not come up within 2 s"


@pytest.mark.parametrize("fate", [dies, fails, hangs])
def test_it_fails_after(fate: Callable[[Node], str], kept: Kept) -> None:
    """The version before is started, with the reason, by the way back that it gave; cores go on, and all is held."""
    old = kept.node()
    old.up()
    core = kept.spawn(old, "/bin/sleep", "100")
    old.put("state", b"exact")
    kept.next(old, patience=2.0)
    new = kept.node()
    new.send("hello")
    assert old.event() == {"next": ""}
    old.end(0)
    new.greeted()
    reason = fate(new)
    back = kept.node()
    assert (back.rest, back.environment["BACK"], back.environment[FAILED]) == (["back"], "yes", reason)
    found = back.up()
    assert content(*found.by_name["state"]) == b"exact" and not found.core(core.pid).ended
    assert "the version before starts again" in kept.lines
    back.die()
    again = kept.node()
    assert again.rest == ["back"] and FAILED not in again.environment


def test_the_way_back_dies(kept: Kept) -> None:
    """It is started again, still with the reason."""
    old, new = kept.two(waits=True)
    old.end(0)
    new.greeted()
    new.end(6)
    kept.node().die()
    again = kept.node()
    assert (again.rest, again.environment[FAILED]) == (["back"], "it ended with exit status 6")


@pytest.mark.parametrize("waits", [False, True])
def test_a_version_that_is_killed_beside_the_next(waits: bool, kept: Kept) -> None:
    """The next one goes on with what the keeper holds by then."""
    old = kept.node()
    old.up()
    old.put("state", b"as of then")
    core = kept.spawn(old, "/bin/sleep", "100")
    kept.next(old)
    new = kept.node()
    if waits:
        new.send("hello")
        assert old.event() == {"next": ""}
    old.die()
    found = new.greeted() if waits else new.hello()
    assert content(*found.by_name["state"]) == b"as of then" and not found.core(core.pid).ended
    new.request("up", seconds=300.0)
    new.die()
    assert kept.node().rest == ["next"]


def test_the_end_beside_the_next(kept: Kept) -> None:
    """The version that runs ends in order: so does the next one."""
    old, new = kept.two(waits=True)
    old.request("bye")
    old.end(0)
    assert kept.wait() == 0
    new.gone()


def test_signals_beside_the_next(kept: Kept) -> None:
    """Only the end is for both."""
    old, new = kept.two()
    kept.process.send_signal(signal.SIGHUP)
    assert old.signal() == signal.SIGHUP and not new.has_signal()
    kept.process.send_signal(signal.SIGTERM)
    assert (old.signal(), new.signal()) == (signal.SIGTERM, signal.SIGTERM)


# Descriptors


def test_many_descriptors(kept: Kept) -> None:
    """They go in parts, in their order."""
    first = kept.node()
    first.up()
    memories = [os.memfd_create(str(number)) for number in range(7)]
    many = [*itertools.islice(itertools.cycle(memories), 600)]
    first.request("put", many, name="many")
    first.put("after", b"it")
    first.die()
    found = kept.node().hello().by_name
    assert [os.fstat(each).st_ino for each in found["many"]] == [os.fstat(each).st_ino for each in many]
    assert content(*found["after"]) == b"it"
    for memory in memories:
        os.close(memory)


def test_more_than_a_thousand_descriptors(kept: Kept) -> None:
    """The keeper spawns cores and starts nodes, however many it holds."""
    first = kept.node()
    first.up()
    with Path(os.devnull).open() as null:
        first.request("put", [null.fileno()] * 1100, name="many")
    core = kept.spawn(first, "/bin/sleep", "100")
    first.die()
    with room_for(1200):
        found = kept.node().hello()
    assert len(found.by_name["many"]) == 1100 and not found.core(core.pid).ended


def test_what_a_core_inherits(kept: Kept) -> None:
    """Its own descriptors, environment and outputs, and nothing of the node or the keeper."""
    node, (there, its) = kept.node(), os.pipe()
    node.up()
    node.put("state", b"secret")
    kept.spawn(node, "/bin/sleep", "100")
    core = kept.spawn(node, "/bin/sleep", "100", targets={5: there, 60: its}, ONE="two")
    # The loader of programs opens files for a moment.
    until(lambda: core.is_executed() and {*core.open_files} == {0, 1, 2, 5, 60}, 10, "it has its own files alone")
    files = core.open_files
    # Ctrl-C in a terminal is for its foreground group.
    assert os.getpgid(core.pid) == core.pid
    assert (files[5], files[0]) == (f"pipe:[{os.fstat(there).st_ino}]", os.devnull)
    assert [os.fstat(core.out).st_ino, os.fstat(core.err).st_ino] == [int(files[n][6:-1]) for n in (1, 2)]
    assert Path(f"/proc/{core.pid}/environ").read_bytes() == b"ONE=two\0"
    status = dict(line.split(":\t") for line in Path(f"/proc/{core.pid}/status").read_text().splitlines())
    assert int(status["SigBlk"], 16) == 0 and int(status["SigCgt"], 16) == 0
    assert not int(status["SigIgn"], 16) & sum(1 << number - 1 for number in (*FORWARDED, signal.SIGPIPE))
    os.close(there)
    os.close(its)


def test_what_a_node_inherits(kept: Kept) -> None:
    """Nothing that the keeper holds or has received: it gets its own duplicates."""
    first = kept.node()
    first.up()
    first.put("state", b"secret")
    kept.spawn(first, "/bin/sleep", "100")
    first.request("alive")
    with Path(os.devnull).open() as null:
        socket.send_fds(first.ask, [b'{"more": true}'], [null.fileno()] * 9)
    before = len([*Path(f"/proc/{first.pid}/fd").iterdir()])
    first.die()
    second = kept.node()
    assert len([*Path(f"/proc/{second.pid}/fd").iterdir()]) == before


def test_an_unfinished_request(kept: Kept) -> None:
    """The keeper closes what a node has sent that dies before it has sent all."""
    first, (there, its) = kept.node(), os.pipe()
    first.up()
    socket.send_fds(first.ask, [b'{"more": true}'], [its])
    os.close(its)
    first.die()
    kept.node().up()
    assert ready(there, 5.0), "it is still open"
    os.close(there)


def test_a_new_process_closes_them_first(kept: Kept) -> None:
    """By the time of the answer no new process has a duplicate of what is held: it would keep an order of listeners."""
    node = kept.node()
    node.up()
    with Path(os.devnull).open() as null:
        node.request("put", [null.fileno()] * 900, name="many")
    for _ in range(5):
        core = kept.spawn(node, "/bin/sleep", "100")
        assert len([*Path(f"/proc/{core.pid}/fd").iterdir()]) < 100


def test_no_more_descriptors(kept: Kept) -> None:
    """A core cannot be started then; all else goes on."""
    node = kept.node()
    node.up()
    core = kept.spawn(node, "/bin/sleep", "100")
    least = len([*Path(f"/proc/{kept.process.pid}/fd").iterdir()]) + 1
    resource.prlimit(kept.process.pid, resource.RLIMIT_NOFILE, (least, least))
    with Path(os.devnull).open() as null:
        node.send("spawn", [null.fileno()], argv=["/bin/sleep", "100"], environment={}, targets=[0])
    node.send("alive")
    replies = iter(lambda: json.loads(node.ask.recv(keeper.MESSAGE) or b'{"n": 0}')["n"], 0)
    assert node.asked in replies
    assert not core.ended and not node.ended


def test_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised as far as the system permits, and never lowered."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        for wanted, limit in (300, 300), (200, 300), (hard + 1, hard):
            monkeypatch.setattr(keeper, "DESCRIPTORS", wanted)
            keeper.raise_descriptor_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_core_that_cannot_be_run(kept: Kept) -> None:
    """It ends as a shell would, with the reason among its output."""
    node = kept.node()
    node.up()
    core = node.spawn("/this/is/missing")
    assert node.event() == {"exited": core.pid, "status": 127 << 8}
    assert os.read(core.err, 100) == f"cannot run /this/is/missing: {os.strerror(errno.ENOENT)}\n".encode()


# systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd(abstract: bool, tmp_path: Path, stack: ExitStack) -> None:
    """It gets the node's texts and the keeper's own signs of life; only from the keeper."""
    there = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    there.settimeout(SECONDS)
    there.bind("" if abstract else str(tmp_path / "n"))
    name = there.getsockname()
    path = "@" + name[1:].decode() if abstract else name
    kept = Kept(tmp_path, stack, NOTIFY_SOCKET=path, WATCHDOG_USEC="60000000")
    node = kept.node()
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & {*node.environment}
    node.up()
    node.request("alive", text="READY=1\nSTATUS=well")
    found = {there.recv(1000)}
    while len(found) < 2:
        found.add(there.recv(1000))
    assert found == {b"WATCHDOG=1", b"READY=1\nSTATUS=well"}


def test_systemd_is_gone(tmp_path: Path, stack: ExitStack) -> None:
    """The keeper and the node go on."""
    kept = Kept(tmp_path, stack, NOTIFY_SOCKET=str(tmp_path / "gone"))
    node = kept.node()
    node.request("alive", text="READY=1")
    node.request("alive")
    until(lambda: "systemd did not get READY" in kept.lines, SECONDS, "the keeper says so")


# A node that becomes its keeper


def test_a_node_becomes_its_keeper(tmp_path: Path, stack: ExitStack) -> None:
    """The process is the keeper then; its child goes on as the node, as if the keeper had executed it."""
    there = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    there.settimeout(SECONDS)
    there.bind(str(tmp_path / "n"))
    given = {"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "30000000"}
    kept = Kept(tmp_path, stack, before="signal = __import__('signal'); signal.signal(1, signal.SIG_IGN)", **given)
    first = kept.node()
    assert first.up() == Held(VERSION, {}, {})
    assert b"import keeper" in Path(f"/proc/{kept.process.pid}/cmdline").read_bytes()
    assert os.getpgid(first.pid) == first.pid != kept.process.pid
    first.request("alive", text="READY=1")
    while (told := there.recv(100)) == b"WATCHDOG=1":
        pass
    assert told == b"READY=1"
    core = kept.spawn(first, "/bin/sleep", "100")
    until(lambda: core.is_executed() and {*core.open_files} == {0, 1, 2}, 10, "it has its own files alone")
    kept.process.send_signal(signal.SIGHUP)
    assert first.signal() == signal.SIGHUP
    first.die()
    second = kept.node()
    assert second.up().core(core.pid)
    for node in first, second:
        assert node.rest == ["--nodaemon", "node"] and node.blocked >= {*WAITING[:2]}
        assert not {*node.environment} & {STATE, *given}
    second.request("bye")
    second.end(5)
    assert kept.wait() == 5


def test_a_node_that_becomes_its_keeper_fails(tmp_path: Path, stack: ExitStack) -> None:
    """The keeper ends with its status, as its settings may be wrong; a killed one is started again."""
    kept = Kept(tmp_path, stack, before="")
    kept.node().die()
    kept.node().end(3)
    assert kept.wait() == 3


@pytest.mark.parametrize("dies", [True, False])
def test_what_comes_before_the_keeper_waits_for_it(dies: bool, tmp_path: Path, stack: ExitStack) -> None:
    """A signal, and the end of the node; also if the process was started with SIGCHLD ignored."""
    before = f"""
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def execute(argv, state, kept):
    os.kill(os.getpid(), 1)
    {dies} and os.waitid(os.P_PID, state["node"][0], os.WEXITED | os.WNOWAIT)
    as_ever(argv, state, kept)
as_ever, keeper.execute = keeper.execute, execute
if {dies}:
    keeper.end_with = lambda _: os.kill(os.getpid(), 9)
"""
    kept = Kept(tmp_path, stack, before=before)
    node = kept.node()
    node.up()
    assert dies == ("it ended by signal 9" in kept.lines)
    assert dies or node.signal() == signal.SIGHUP


def test_a_node_with_threads_is_executed_anew(tmp_path: Path, stack: ExitStack) -> None:
    """A child would not have the threads: the keeper starts the node."""
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    kept = Kept(tmp_path, stack, before=f"import os\nif keeper.VARIABLE not in os.environ: {thread}")
    node = kept.node()
    node.up()
    words = Path(f"/proc/{kept.process.pid}/cmdline").read_text().split("\0")[:-1]
    assert words[-len(kept.command) :] == kept.command
    node.end(4)
    kept.node().request("bye")


def test_a_node_that_cannot_be_forked(tmp_path: Path, stack: ExitStack) -> None:
    """The keeper starts it as soon as that is possible."""
    before = """
import os
def fork():
    raise BlockingIOError(11, "too many processes")
if keeper.VARIABLE not in os.environ:
    os.fork = fork
"""
    kept = Kept(tmp_path, stack, before=before)
    node = kept.node()
    node.up()
    kept.process.send_signal(signal.SIGHUP)
    assert node.signal() == signal.SIGHUP


def test_closed_standard_files(tmp_path: Path, stack: ExitStack) -> None:
    """Sockets do not take their places: what the keeper and new processes print would go there."""
    before = "import os\nif keeper.VARIABLE not in os.environ: os.closerange(0, 3)"
    kept = Kept(tmp_path, stack, before=before)
    node = kept.node()
    node.up()
    for pid in kept.process.pid, node.pid:
        assert {Path(f"/proc/{pid}/fd/{number}").readlink() for number in range(3)} == {Path(os.devnull)}
    # It cannot be executed, which its process prints.
    missing = [{}, [str(tmp_path / "missing")]]
    node.request("next", command=missing, plain=missing, back=missing, patience=60.0)
    assert node.event() == {"next": "it ended with exit status 127"}


def test_a_keeper_that_cannot_be_executed(tmp_path: Path, stack: ExitStack) -> None:
    """No node is left without it."""
    kept = Kept(tmp_path, stack, before="launch.words_of = lambda _: ['/this/is/missing']")
    assert kept.wait() == 1
    assert "/this/is/missing" in kept.lines


# The keeper's own next version


def test_it_becomes_another_version(tmp_path: Path, stack: ExitStack) -> None:
    """The same process holds all that it held; node and cores go on, and their statuses come."""
    there = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    there.settimeout(SECONDS)
    there.bind(str(tmp_path / "n"))
    kept = Kept(tmp_path, stack, NOTIFY_SOCKET=str(tmp_path / "n"))
    other = tmp_path / "other.py"
    other.write_text(Path(SCRIPT).read_text().replace(f"\nVERSION = {VERSION}\n", "\nVERSION = 1001\n"))
    node = kept.node()
    node.up()
    node.put("state", b"it")
    over, ends, stays = (
        kept.spawn(node, "/bin/sh", "-c", words) for words in ("exit 3", "echo here; exec sleep 99", ECHO)
    )
    assert node.event()["exited"] == over.pid and ready(ends.out, SECONDS)
    node.request("become", argv=[*PYTHON, str(other)])
    os.kill(ends.pid, signal.SIGKILL)
    assert node.event() == {"exited": ends.pid, "status": signal.SIGKILL}
    node.request("alive", text="READY=1")
    assert there.recv(100) == b"READY=1"
    assert str(other).encode() in Path(f"/proc/{kept.process.pid}/cmdline").read_bytes()
    more = kept.spawn(node, "/bin/sleep", "100")
    until(lambda: more.is_executed() and {*more.open_files} == {0, 1, 2}, 10, "it has its own files alone")
    assert not stays.ended
    node.die()
    second = kept.node()
    found = second.up()
    assert found.version == 1001 and STATE not in second.environment
    assert found.exits == {over.pid: 3 << 8, ends.pid: signal.SIGKILL}
    assert content(*found.by_name["state"]) == b"it"
    assert os.read(found.core(ends.pid).out, 100) == b"here\n"
    assert not found.core(stays.pid).ended and not found.core(more.pid).ended
    second.request("bye")
    second.end(5)
    assert kept.wait() == 5


def test_it_becomes_another_version_beside_the_next(kept: Kept) -> None:
    """The next version of the node ends, and the node receives the reason."""
    node = kept.node()
    node.up()
    kept.next(node)
    other = kept.node()
    node.request("become", argv=[*PYTHON, SCRIPT])
    other.gone()
    assert node.event() == {"next": "the keeper changes its version"}
    node.die()
    assert kept.node().rest == []


def test_a_signal_and_a_death_while_it_becomes_another(kept: Kept) -> None:
    """They wait until the new version handles them."""
    node = kept.node()
    node.up()
    core = kept.spawn(node, "/bin/sleep", "100")
    with kept.stopped():
        node.send("become", argv=[*PYTHON, SCRIPT])
        kept.process.send_signal(signal.SIGHUP)
        os.kill(core.pid, signal.SIGKILL)
        assert ready(core.pidfd, SECONDS)
    node.receive()
    assert (node.event()["exited"], node.signal()) == (core.pid, signal.SIGHUP)
    node.request("alive")


# The keeper, whose node dies just before it executes its next version.
DYING = f"""
import os, signal, sys
sys.path.append({str(Path(SCRIPT).parent)!r})
import keeper

def become(self, *words):
    os.kill(self.node.pid, signal.SIGKILL)
    os.waitid(os.P_PID, self.node.pid, os.WEXITED | os.WNOWAIT)
    as_ever(self, *words)

as_ever, keeper.Keeper.become = keeper.Keeper.become, become
keeper.main()
"""


@pytest.mark.parametrize("script", [SCRIPT, "/this/is/missing"])
def test_a_node_that_dies_before_it_becomes_another(script: str, tmp_path: Path, stack: ExitStack) -> None:
    """Whether the keeper can execute the other version or not, the next node finds all that is held."""
    kept = Kept(tmp_path, stack, ("-c", DYING))
    node = kept.node()
    node.up()
    node.put("state", b"it")
    core = kept.spawn(node, "/bin/sleep", "100")
    node.request("become", argv=[*PYTHON, script] if script == SCRIPT else [script])
    node.gone()
    found = kept.node().up()
    assert content(*found.by_name["state"]) == b"it" and not found.core(core.pid).ended
    assert f"node {node.pid}: it ended by signal 9; cores go on" in kept.lines


# Anything, in any order

STEPS = ["spawn", "exit", "put", "drop", "forget", "kill", "next", "take over", "become", "end"]


# The core of the first "exit" is dead before the second one.
@settings(max_examples=8, deadline=None)
@example(steps=["spawn", "exit", "kill", "exit"], last="bye")
@given(steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=7), last=st.sampled_from(["bye", "TERM", "KILL"]))
def test_no_process_is_left(steps: list[str], last: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever nodes and cores did: what the keeper holds is what they left, and all ends with it."""
    with ExitStack() as stack:
        kept = Kept(tmp_path_factory.mktemp("keeper"), stack)
        node = kept.node()
        node.up()
        cores: list[Core] = []
        put: set[str] = set()
        for number, step in enumerate(steps):
            match step:
                case "spawn":
                    cores.append(kept.spawn(node, "/bin/sleep", "100"))
                case "exit" if cores:
                    with suppress(ProcessLookupError):  # an earlier "exit" ended it
                        signal.pidfd_send_signal(cores[-1].pidfd, signal.SIGTERM)
                case "put":
                    node.put(f"name/{number}", b"")
                    put.add(f"name/{number}")
                case "drop" if put:
                    node.request("drop", names=[put.pop()])
                case "forget" if cores:
                    node.request("forget", pid=cores.pop().pid)
                case "kill" | "end":
                    node.die() if step == "kill" else node.end(9)
                    node = kept.node()
                    _holds(node.up(), cores, put)
                case "next" | "take over":
                    kept.next(node)
                    other = kept.node()
                    other.send("hello")
                    if step == "take over":
                        until(lambda: "next" in node.event(), SECONDS)  # noqa: B023 - called here
                        node.end(0)
                        node = other
                        _holds(node.greeted(), cores, put)
                        node.request("up", seconds=300.0)
                    else:
                        node.request("cancel", reason="no")
                        other.gone()
                case "become":
                    node.request("become", argv=[*PYTHON, SCRIPT])
        if last == "bye":
            node.request("bye")
            node.end(0)
            assert kept.wait() == 0
        elif last == "TERM":
            kept.process.terminate()
            assert node.signal() == signal.SIGTERM
            node.end(0)
            assert kept.wait() == 0


def _holds(found: Held, cores: Sequence[Core], put: set[str]) -> None:
    assert put | {f"core/{core.pid}" for core in cores} == {*found.by_name}
