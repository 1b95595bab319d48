"""The hand-over file between two programs of the node."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from node.upgrade import trampoline
from node.upgrade.handle import FORMATS, ONE, SEVERAL, Handle, write
from node.upgrade.trampoline import FAILED, PATH, VARIABLE
from protos.handover_pb2 import Handover, Run

WORDS = {"program": ["python", "twistd"], "before": ["python", "twistd"], "kept": "", "patience": 1.0}


@pytest.fixture
def lock() -> Iterator[int]:
    descriptor = os.memfd_create("lock")
    yield descriptor
    os.close(descriptor)


def left(lock: int) -> Handover:
    return Handover(format=ONE, lock=lock, ports={"rest": lock}, run=Run(pid=7, descriptors=[lock]))


def test_what_is_left_is_taken(lock: int) -> None:
    """The next program takes it, with descriptors that its children do not inherit; then it is closed for good."""
    os.set_inheritable(lock, False)
    descriptor = write(WORDS, left(lock))
    assert os.get_inheritable(lock)
    found = trampoline.header(descriptor)
    assert {*found.pop("descriptors")} == {lock} and found == json.loads(json.dumps(WORDS))
    environment = {VARIABLE: str(descriptor), "OTHER": "1"}
    handle = Handle(environment)
    taken = handle.take()
    assert taken is not None and (taken.handover, taken.failed) == (left(lock), "")
    assert not os.get_inheritable(lock) and not os.get_inheritable(descriptor)
    handle.commit()
    assert environment == {"OTHER": "1"}
    with pytest.raises(OSError):
        os.fstat(descriptor)
    handle.commit()
    assert Handle(environment).take() is None


def test_several_cores_are_taken(lock: int) -> None:
    """With all their open descriptors."""
    others = [os.memfd_create("other") for _ in range(2)]
    handover = left(lock)
    handover.format = SEVERAL
    handover.draining.add(pid=6, descriptors=others[:1], since=7.5)
    handover.together.descriptors.extend(others[1:])
    descriptor = write(WORDS, handover)
    assert all(map(os.get_inheritable, others))
    handle = Handle({VARIABLE: str(descriptor)})
    taken = handle.take()
    assert taken is not None and taken.handover == handover
    assert not any(map(os.get_inheritable, others))
    handle.commit()
    for other in others:
        os.close(other)


def test_one_that_has_ended_meanwhile(lock: int) -> None:
    """Its descriptors are gone: the others are still passed back."""
    gone = os.memfd_create("gone")
    handover = left(lock)
    handover.draining.add(pid=6, descriptors=[gone])
    descriptor = write(WORDS, handover)
    handle = Handle({VARIABLE: str(descriptor)})
    assert handle.take() is not None
    os.close(gone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execve", lambda *_: None)
        patch.setattr(signal, "pthread_sigmask", lambda *_: None)
        patch.setitem(os.environ, VARIABLE, str(descriptor))
        handle.go_back("it broke")
    assert os.get_inheritable(lock)
    os.set_inheritable(lock, False)
    handle.commit()


@pytest.mark.parametrize("what", [b"", b"no message \xff\xff", None], ids=["nothing", "no message", "another format"])
def test_what_cannot_be_read(what: bytes | None, lock: int) -> None:
    """It names no core then, so the core is found and ended as an orphan; ports and lock are still read."""
    handover = left(lock)
    handover.format = max(FORMATS) + 1
    descriptor = write(WORDS, handover)
    if what is not None:
        os.ftruncate(descriptor, len(json.dumps(WORDS)) + 1)
        os.pwrite(descriptor, what, len(json.dumps(WORDS)) + 1)
    handle = Handle({VARIABLE: str(descriptor)})
    taken = handle.take()
    assert taken is not None and not taken.handover.HasField("run")
    assert taken.handover.lock == (lock if what is None else 0)
    handle.commit()


def test_the_way_back(lock: int) -> None:
    """The previous program gets the reason why it runs again; the next program finds its modules in the usual place."""
    descriptor = write(WORDS, left(lock))
    environment = {VARIABLE: str(descriptor), FAILED: "it broke", PATH: "/there", "PYTHONPATH": "/kept:/there"}
    handle = Handle(environment)
    taken = handle.take()
    assert taken is not None and taken.failed == "it broke"
    assert environment["PYTHONPATH"] == "/there"
    # There is no other program to go back to.
    handle.go_back("it breaks again")
    handle.commit()
    assert environment == {"PYTHONPATH": "/there"}


def test_any_reason(lock: int) -> None:
    """The failed version's reason may be any text: the way back works with it."""
    descriptor = write(WORDS, left(lock))
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execve", lambda path, argv, environment: found.append(environment[FAILED]))
        patch.setattr(signal, "pthread_sigmask", lambda *_: None)
        patch.setitem(os.environ, VARIABLE, str(descriptor))
        trampoline.back("it said a\0b\ud800\u2192")
    os.close(descriptor)
    assert found == ["it said a b\\ud800\\u2192"]
