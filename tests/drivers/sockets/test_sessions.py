"""UDP with sessions led from one process to another: clients are told, and find one process before and after that."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from drivers.sockets import sessions
from drivers.sockets.group import Unsteerable
from drivers.sockets.hiding import hide, show
from drivers.sockets.reuseport import address_of
from drivers.sockets.sessions import Sessions
from scripts.staging.wait import until
from tests.harness import handed_on
from tests.harness.answering import NOBODY, Port, answer, end

# Where a process is bound, to which interface, and by which addresses clients come to it.
WHERE = {
    "of one": ("127.0.0.1", "", ["127.0.0.1"]),
    "of all": ("0.0.0.0", "", ["127.0.0.1"]),
    "of both families": ("::", "", ["127.0.0.1", "::1"]),
    "of an interface": ("0.0.0.0", "lo", ["127.0.0.1"]),
}


LOST = "lost"


class Led:
    """A port, and what happens on it. `dark` is what does in the moment when nobody is there."""

    def __init__(self, port: Port, sessions: Sessions) -> None:
        self.port, self.sessions = port, sessions
        self.start, self.join, self.met = port.start, port.join, port.met
        self.dark: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        """In the place of `time.sleep`."""
        assert seconds == sessions.DARK
        self.dark()

    def lead(self, one: subprocess.Popen[bytes]) -> None:
        self.sessions.lead(one.pid)

    def end(self, one: subprocess.Popen[bytes]) -> None:
        end(one)
        self.sessions.leave(one.pid)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, nobody finds another process before they are told that there is none; until all are it is dark."""
        clients = [self.port.stack.enter_context(self.port.client(name)) for name in self.port.names]
        before, over = {answer(one) for one in clients}, threading.Event()
        heard: list[list[str]] = [[] for _ in clients]

        def talk() -> None:
            while not over.is_set():
                for one, answers in zip(clients, heard, strict=True):
                    answers.append(patient(one))

        self.dark = lambda: until(lambda: all(NOBODY in answers for answers in heard), what="all are told")
        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert all(set(answers[: answers.index(NOBODY)]) <= {*before, LOST} for answers in heard)


def patient(client: socket.socket) -> str:
    """Who answers, if anybody does: a process that was killed is still there for a moment."""
    client.settimeout(0.05)
    try:
        return answer(client)
    except TimeoutError:
        return LOST


@pytest.fixture(params=WHERE)
def led(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Led]:
    host, interface, names = WHERE[request.param]
    with closing(Sessions()) as steering:
        port = Port(steering, host, names, interface)
        made = Led(port, steering)
        monkeypatch.setattr(sessions, "time", made)
        with port.stack:
            yield made


def test_led_again_and_again(led: Led) -> None:
    """Nobody finds who joins until it is led to, and then all do, whatever those before it do; so for each next one."""
    current = led.join("a")
    olds = []
    for name in "bcd":
        led.sessions.hold(current.pid)
        new = led.start(name)
        before = led.met()
        assert len(before) == 1
        led.sessions.join(new.pid, led.port.ports)
        assert led.met() == before
        with led.told():
            led.lead(new)
        assert led.met() == {name}
        olds.append(current)
        current = new
    for one in olds:
        led.end(one)
        assert led.met() == {"d"}


@pytest.mark.parametrize("dark", [False, True])
def test_the_node_is_killed(led: Led, dark: bool) -> None:
    """Another one has clients find whom it is told, where they found that one before or, just then, nobody."""
    old = led.join("a")
    led.sessions.hold(old.pid)
    new = led.join("b")
    led.lead(new)
    if dark:
        led.sessions.silence(new.pid)
    handed_on.killed(led.sessions)
    led.sessions = led.port.steering = Sessions()
    led.sessions.regain({one.pid: led.port.ports for one in (old, new)}, new.pid)
    led.lead(new)
    assert led.met() == {"b"}
    led.sessions.hold(new.pid)
    newest = led.join("c")
    assert led.met() == {"b"}
    led.end(old)
    with led.told():
        led.lead(newest)
    led.end(new)
    assert led.met() == {"c"}


def test_handed_on(led: Led) -> None:
    """Another program of the node knows whom clients find, and whom they are to find next."""

    def hand_on() -> None:
        led.sessions = led.port.steering = handed_on.sessions(led.sessions)

    old = led.join("a")
    hand_on()
    led.sessions.hold(old.pid)
    new = led.join("b")
    hand_on()
    assert led.met() == {"a"}
    with led.told():
        led.lead(new)
    hand_on()
    assert led.met() == {"b"}
    with led.told():
        led.lead(old)
    hand_on()
    assert led.met() == {"a"}
    led.end(new)
    assert led.met() == {"a"}
    led.sessions.close()


def test_the_way_back(led: Led) -> None:
    """Who was led to dies: clients are told so, and find the one before it, also after the next has come."""
    old = led.join("a")
    new = led.join("b")
    led.lead(new)
    with led.told():
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
    """Also while both live."""
    old, new = led.join("a"), led.join("b")
    for one, name in ((new, "b"), (old, "a"), (new, "b"), (new, "b")):
        led.lead(one)
        assert led.met() == {name}


def test_who_serves_dies_before_the_next_is_led_to(led: Led) -> None:
    """Clients are told at once."""
    old, new = led.join("a"), led.join("b")
    with led.told():
        led.end(old)
        led.lead(new)
    assert led.met() == {"b"}


def test_who_serves_dies(led: Led) -> None:
    """Clients are told before anybody has noticed, whoever waits to be next or drains."""
    old, new = led.join("a"), led.join("b")
    led.lead(new)
    led.join("c")
    end(new)
    assert led.met() == {NOBODY}
    led.sessions.leave(new.pid)
    led.lead(old)
    assert led.met() == {"a"}


def test_who_comes_dies(led: Led) -> None:
    """Before anybody is led to it: nobody notices."""
    old, new = led.join("a"), led.join("b")
    led.end(new)
    assert led.met() == {"a"}
    assert old.poll() is None


def test_the_one_that_is_led_to_dies_in_the_dark(led: Led) -> None:
    """The one before it is found again."""
    old, new = led.join("a"), led.join("b")

    def dark() -> None:
        assert led.met() == {NOBODY}
        end(new)

    led.dark = dark
    led.lead(new)
    led.sessions.leave(new.pid)
    led.lead(old)
    assert led.met() == {"a"}


def test_a_fault_in_the_dark(led: Led) -> None:
    """Whatever happens, it ends."""
    led.join("a")
    new = led.join("b")
    led.dark = mock.Mock(side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        led.lead(new)
    assert led.met() == {"b"}


def test_an_address_that_the_next_one_does_not_have(led: Led) -> None:
    """Nobody is there then, without a pause; the one after it has it at once."""
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


def test_before_an_end(led: Led) -> None:
    """Nobody is there, neither those who drain; whoever is led to after it is found again."""
    old, new = led.join("a"), led.join("b")
    led.lead(new)
    led.sessions.silence(new.pid)
    assert led.met() == {NOBODY}
    led.end(new)
    assert led.met() == {NOBODY}
    led.lead(old)
    assert led.met() == {"a"}


def test_let_go(led: Led) -> None:
    """Who is alone is found, also when another one is held that comes later."""
    led.join("a")
    new = led.join("b")
    led.lead(new)
    led.sessions.close()
    assert led.met() == {"b"}
    again = Sessions()
    with closing(again), pytest.raises(Unsteerable, match="another process"):
        again.join(new.pid, led.port.ports)


def test_a_stranger(led: Led) -> None:
    """Another socket at the address, which nobody took up."""
    led.start("x")
    with pytest.raises(Unsteerable, match="another process"):
        led.join("a")


def test_a_place_that_cannot_be_held(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no socket of ours can be beside one that was hidden, that is said."""
    led.join("a")
    new = led.join("b")
    led.lead(new)
    refused: Callable[..., None] = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(sessions, "_twin", refused)
    with pytest.raises(Unsteerable, match=f":{led.port.number} cannot be held by the node itself: Permission denied"):
        led.sessions.hold(new.pid)


def test_hidden_twice() -> None:
    """It is where it was, whatever was done before."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.connect(("127.0.0.1", 9))
        before = address_of(one)
        hide(one)
        hide(one)
        show(one, 0)
        assert address_of(one).interface == before.interface


def test_no_file_is_left(led: Led) -> None:
    """Nothing that was looked at stays open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    led.join("a")
    new = led.join("b")
    led.lead(new)
    led.sessions.hold(new.pid)
    led.sessions.close()
    # The output of each process.
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2
