"""Updates of the node: what it asks the service that installs versions, and what it makes of its reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import Clock

from node import __version__
from node.updates import program
from node.updates.jobs import Refused, Stage, Step
from node.updates.program import LOOK, NEWEST, NO_SERVICE, REQUEST, TAKEN, Program
from protos import service_pb2 as pb
from tests.node.updates.pool import pooled


class Machine:
    """A node's directory, and the service beside it, which does what a test says."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.reports = directory / "state", directory / "reports"
        for made in (self.state, self.reports):
            made.mkdir()
        monkeypatch.setattr(program, "REPORTS", self.reports)
        self.clock = Clock()
        self.job, self.said = pb.Job(state="running"), list[str]()
        self.upgrade: Deferred[str] = Deferred()
        self.jobs: Any = SimpleNamespace(report=self._report, save=self._saved, stage=Stage.CHANGING)
        upgrades: Any = SimpleNamespace(wanted=lambda: self.upgrade)
        kit: Any = SimpleNamespace(reactor=pooled(self.clock))
        self.program = Program(kit, self.state, upgrades)

    def _report(self, job: pb.Job) -> None:
        self.said.append(job.text)

    @staticmethod
    async def _saved() -> None:
        pass

    @property
    def request(self) -> Path:
        return self.state / REQUEST

    def update(self, version: str = "1.0.1", sha256: str = "") -> Deferred[None]:
        return ensureDeferred(self.program.update(version, sha256, Step(self.job, self.jobs)))

    def take(self, *lines: str) -> None:
        """The service begins."""
        (self.reports / "said").write_text("".join(f"{line}\n" for line in lines))
        (self.reports / "result").unlink(missing_ok=True)
        self.request.unlink()
        self.clock.advance(LOOK)

    def say(self, *lines: str, result: str = "") -> None:
        with (self.reports / "said").open("a") as said:
            said.write("".join(f"{line}\n" for line in lines))
        if result:
            (self.reports / "result").write_text(f"{result}\n")
        self.clock.advance(LOOK)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def failure(update: Deferred[None]) -> str:
    """The text with which an update was refused."""
    reasons: list[Any] = []
    update.addErrback(reasons.append)
    assert reasons[0].check(Refused), reasons
    return str(reasons[0].value.text)


@pytest.mark.parametrize(
    ("version", "sha256", "asked"),
    [("1.0.1", "", "1.0.1"), ("1.0.1", "a" * 64, f"1.0.1 {'a' * 64}"), (NEWEST, "", "latest")],
)
def test_the_request(version: str, sha256: str, asked: str, machine: Machine) -> None:
    """The version, and the digest of the caller: no address, no path, no option."""
    machine.update(version, sha256)
    assert machine.request.read_text() == asked and machine.request.stat().st_mode & 0o777 == 0o600


def test_what_the_service_does_is_the_progress(machine: Machine) -> None:
    """In this process if nothing had to be handed over; its last line is the result."""
    done = machine.update()
    machine.take("  wheel       getting it: some seconds")
    machine.say("  version     installing 1.0.1-abc: about a minute")
    assert not done.called and machine.jobs.stage is Stage.BECOMING
    machine.say("  service     runs this version already: nothing to do", result="success")
    assert done.called and machine.said[-2:] == [
        "wheel getting it: some seconds",
        "version installing 1.0.1-abc: about a minute",
    ]
    assert machine.job.text == "service runs this version already: nothing to do"
    assert (machine.job.before, machine.job.after) == (__version__, __version__)


def test_a_service_that_fails(machine: Machine) -> None:
    """The job has its last lines, or else systemd's word for its end."""
    failed = machine.update()
    machine.take(*(f"line {number}" for number in range(10)))
    machine.say("txnode-1.0.1-py3-none-any.whl is not signed by a key of --key: not installed.", result="exit-code")
    assert failure(failed).splitlines() == [
        *(f"line {number}" for number in range(6, 10)),
        "txnode-1.0.1-py3-none-any.whl is not signed by a key of --key: not installed.",
    ]
    failed = machine.update()
    machine.take()
    machine.say(result="timeout")
    assert failure(failed) == "txnode-update.service ended: timeout"
    failed = machine.update()
    machine.take()
    (machine.reports / "said").unlink()
    machine.clock.advance(LOOK)
    assert failure(failed) == "txnode-update.service ended: no result"


def test_the_reports_of_an_earlier_request(machine: Machine) -> None:
    """They say nothing of this one."""
    for name, text in (("said", "an old reason\n"), ("result", "exit-code\n")):
        (machine.reports / name).write_text(text)
    waits = machine.update()
    machine.clock.advance(LOOK)
    assert not waits.called
    machine.take("wheel getting it")
    assert not waits.called and "an old reason" not in machine.said
    machine.say(result="success")
    assert waits.called


def test_no_service(machine: Machine) -> None:
    """The job says what to do instead, and the request does not wait for a service that comes later."""
    failed = machine.update()
    machine.clock.pump([LOOK] * int(TAKEN / LOOK))
    assert failure(failed) == NO_SERVICE and not machine.request.exists()


def test_a_node_that_stops_while_it_asks(machine: Machine) -> None:
    """Nothing is installed after it."""
    update, reasons = machine.update(), list[Any]()
    update.addErrback(reasons.append)
    update.cancel()
    assert reasons[0].check(CancelledError) and not machine.request.exists()


def test_a_full_disk(machine: Machine) -> None:
    machine.state.rmdir()
    assert failure(machine.update()).startswith(f"{machine.request} cannot be written: No such file")


def test_without_a_version(machine: Machine) -> None:
    """The node hands over to what is installed, and asks nothing of the service."""
    update = machine.update("")
    assert machine.jobs.stage is Stage.BECOMING and not machine.request.exists()
    machine.upgrade.callback("the version on disk cannot take over")
    assert failure(update) == "the version on disk cannot take over"


def test_whether_the_service_works(machine: Machine) -> None:
    """It has begun, and has not ended."""
    assert not machine.program.installs
    machine.update()
    machine.take("wheel getting it")
    assert machine.program.installs
    machine.say(result="success")
    assert not machine.program.installs


def test_what_another_program_left_there(machine: Machine) -> None:
    """Bytes that are no text do not end the job."""
    done = machine.update()
    machine.take()
    (machine.reports / "said").write_bytes(b"\xff\xfe\n")
    machine.say(result="success")
    assert done.called and cast(Any, done).result is None
