"""UDP sessions moved from one process to another: clients get ICMP port unreachable in between."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from unittest import mock

import pytest

from drivers.sockets import sessions
from drivers.sockets.held import Unsteerable
from drivers.sockets.reuseport import address_of
from drivers.sockets.sessions import Sessions, hide, show
from scripts.staging.wait import until
from tests.harness import handed_on
from tests.harness.answering import NOBODY, Port, answer, end
from tests.harness.open_files import open_files

# Where a process is bound, to which interface, and the addresses that clients use.
WHERE = {
    "of one": ("127.0.0.1", "", ["127.0.0.1"]),
    "of all": ("0.0.0.0", "", ["127.0.0.1"]),
    "of both families": ("::", "", ["127.0.0.1", "::1"]),
    "of an interface": ("0.0.0.0", "lo", ["127.0.0.1"]),
}


LOST = "lost"


class Led:
    """A port and its processes. `dark` runs in the moment when all sockets there are hidden."""

    def __init__(self, port: Port, sessions: Sessions) -> None:
        self.port, self.sessions = port, sessions
        self.start, self.join, self.met = port.start, port.join, port.met
        self.dark: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        """Replaces `time.sleep`."""
        assert seconds == sessions.DARK
        self.dark()

    def lead(self, one: subprocess.Popen[bytes]) -> None:
        self.sessions.lead(one.pid)

    def end(self, one: subprocess.Popen[bytes]) -> None:
        end(one)
        self.sessions.leave(one.pid)

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Inside, no client reaches another process before it gets port unreachable; until all have, all is hidden."""
        clients = [self.port.stack.enter_context(self.port.client(name)) for name in self.port.names]
        before, over = {answer(one) for one in clients}, threading.Event()
        heard: list[list[str]] = [[] for _ in clients]

        def talk() -> None:
            while not over.is_set():
                for one, answers in zip(clients, heard, strict=True):
                    answers.append(patient(one))

        self.dark = lambda: until(lambda: all(NOBODY in answers for answers in heard), what="all got port unreachable")
        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert all(set(answers[: answers.index(NOBODY)]) <= {*before, LOST} for answers in heard)


def patient(client: socket.socket) -> str:
    """Who answers, if any process does: one that was killed exists for a moment longer."""
    client.settimeout(0.05)
    try:
        return answer(client)
    except TimeoutError:
        return LOST


@pytest.fixture(params=WHERE)
def led(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Led]:
    host, interface, names = WHERE[request.param]
    with closing(Sessions(handed_on.shelf())) as steering:
        port = Port(steering, host, names, interface)
        made = Led(port, steering)
        monkeypatch.setattr(sessions, "time", made)
        with port.stack:
            yield made


def test_moved_again_and_again(led: Led) -> None:
    """No client reaches a process that joins until it is led to; then all do, again and again."""
    current = led.join("a")
    olds = []
    for name in "bcd":
        led.sessions.hold(current.pid)
        new = led.start(name)
        before = led.met()
        assert len(before) == 1
        led.sessions.join(new.pid, led.port.ports)
        assert led.met() == before
        with led.moved():
            led.lead(new)
        assert led.met() == {name}
        olds.append(current)
        current = new
    for one in olds:
        led.end(one)
        assert led.met() == {"d"}


@pytest.mark.parametrize("dark", [False, True])
def test_the_node_is_killed(led: Led, dark: bool) -> None:
    """The next node process has clients reach the given process, wherever they were before or if all is hidden."""
    old = led.join("a")
    led.sessions.hold(old.pid)
    new = led.join("b")
    led.lead(new)
    if dark:
        led.sessions.silence(new.pid)
    led.sessions = led.port.steering = handed_on.sessions(led.sessions)
    led.sessions.settle()
    led.lead(new)
    assert led.met() == {"b"}
    led.sessions.hold(new.pid)
    newest = led.join("c")
    assert led.met() == {"b"}
    led.end(old)
    with led.moved():
        led.lead(newest)
    led.end(new)
    assert led.met() == {"c"}


def test_handed_over(led: Led) -> None:
    """The next node process knows which process clients reach, and which they reach next."""

    def hand_on() -> None:
        led.sessions = led.port.steering = handed_on.sessions(led.sessions)

    old = led.join("a")
    hand_on()
    led.sessions.hold(old.pid)
    new = led.join("b")
    hand_on()
    assert led.met() == {"a"}
    with led.moved():
        led.lead(new)
    hand_on()
    assert led.met() == {"b"}
    with led.moved():
        led.lead(old)
    hand_on()
    assert led.met() == {"a"}
    led.end(new)
    assert led.met() == {"a"}
    led.sessions.close()


def test_the_way_back(led: Led) -> None:
    """If the new process dies, clients get port unreachable and reach the one before, also with a next one there."""
    old = led.join("a")
    new = led.join("b")
    led.lead(new)
    with led.moved():
        end(new)
        led.sessions.leave(new.pid)
        led.lead(old)
    assert led.met() == {"a"}
    led.sessions.hold(old.pid)
    next_one = led.join("c")
    assert led.met() == {"a"}
    led.lead(next_one)
    assert led.met() == {"c"}


def test_both_ways(led: Led) -> None:
    """Clients can be moved back while both processes live."""
    old, new = led.join("a"), led.join("b")
    for one, name in ((new, "b"), (old, "a"), (new, "b"), (new, "b")):
        led.lead(one)
        assert led.met() == {name}


def test_the_visible_process_dies_before_a_move(led: Led) -> None:
    """Clients get port unreachable at once."""
    old, new = led.join("a"), led.join("b")
    with led.moved():
        led.end(old)
        led.lead(new)
    assert led.met() == {"b"}


def test_the_visible_process_dies(led: Led) -> None:
    """Clients get port unreachable before the node notices, with others waiting or draining there."""
    old, new = led.join("a"), led.join("b")
    led.lead(new)
    led.join("c")
    end(new)
    assert led.met() == {NOBODY}
    led.sessions.leave(new.pid)
    led.lead(old)
    assert led.met() == {"a"}


def test_a_joining_process_dies(led: Led) -> None:
    """If it dies before it is led to, clients notice nothing."""
    old, new = led.join("a"), led.join("b")
    led.end(new)
    assert led.met() == {"a"}
    assert old.poll() is None


def test_the_new_process_dies_while_all_is_hidden(led: Led) -> None:
    """Clients reach the one before it again."""
    old, new = led.join("a"), led.join("b")

    def dark() -> None:
        assert led.met() == {NOBODY}
        end(new)

    led.dark = dark
    led.lead(new)
    led.sessions.leave(new.pid)
    led.lead(old)
    assert led.met() == {"a"}


def test_an_error_while_all_is_hidden(led: Led) -> None:
    """After an error sockets are shown again all the same."""
    led.join("a")
    new = led.join("b")
    led.dark = mock.Mock(side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        led.lead(new)
    assert led.met() == {"b"}


def test_an_address_that_the_next_one_does_not_have(led: Led) -> None:
    """All is hidden there, without a pause; a later process is shown there at once."""
    old = led.join("a")
    elsewhere = Port(led.sessions, led.port.host, led.port.names)
    with elsewhere.stack:
        new = elsewhere.join("b")
        assert elsewhere.met() == {"b"}
        led.dark = mock.Mock(side_effect=RuntimeError)
        led.lead(new)
        led.dark = lambda: None
        assert (led.met(), elsewhere.met()) == ({NOBODY}, {"b"})
        again = led.join("c")
        assert led.met() == {"c"}
        led.lead(again)
        assert (led.met(), elsewhere.met()) == ({"c"}, {NOBODY})
        led.lead(old)
        assert led.met() == {"a"}


def test_before_an_exit(led: Led) -> None:
    """All sockets are hidden, also of draining processes; a process led to later is shown."""
    old, new = led.join("a"), led.join("b")
    led.lead(new)
    led.sessions.silence(new.pid)
    assert led.met() == {NOBODY}
    led.end(new)
    assert led.met() == {NOBODY}
    led.lead(old)
    assert led.met() == {"a"}


def test_close(led: Led) -> None:
    """Clients reach the only process, also when a later one is held beside it."""
    led.join("a")
    new = led.join("b")
    led.lead(new)
    led.sessions.close()
    assert led.met() == {"b"}
    again = Sessions(handed_on.shelf())
    with closing(again), pytest.raises(Unsteerable, match="another process"):
        again.join(new.pid, led.port.ports)


def test_a_stranger(led: Led) -> None:
    """A socket at the address whose process has not joined."""
    led.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        led.join("a")


def test_a_place_that_cannot_be_held(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, if no socket of ours can be bound beside one that was hidden."""
    led.join("a")
    new = led.join("b")
    led.lead(new)
    refused: Callable[..., None] = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(sessions, "_twin", refused)
    with pytest.raises(
        Unsteerable, match=f":{led.port.number} cannot be kept with the current core: Permission denied"
    ):
        led.sessions.hold(new.pid)


def test_hidden_twice() -> None:
    """A socket is back at its interface, however often it was hidden."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.connect(("127.0.0.1", 9))
        before = address_of(one)
        hide(one)
        hide(one)
        show(one, 0)
        assert address_of(one).interface == before.interface


def test_no_descriptor_is_left(led: Led) -> None:
    """No duplicate stays open."""
    before = open_files()
    led.join("a")
    new = led.join("b")
    led.lead(new)
    led.sessions.hold(new.pid)
    led.sessions.close()
    # The output of each process. Threads of other tests may have closed some of those before.
    assert len(open_files().items() - before.items()) == 2
