"""The pool of one thread."""

from __future__ import annotations

import threading

import pytest

from node.base.pool import OneThread


def test_works_are_done_in_order_before_the_end() -> None:
    """In one thread, also those that came before its start; a work that fails affects no other."""
    pool, done = OneThread("one"), list[object]()

    def add(good: bool, outcome: object) -> None:
        done.append(outcome if good else "failed")

    pool.callInThreadWithCallback(add, threading.current_thread)
    pool.start()
    pool.callInThreadWithCallback(add, int, "x")
    for number in range(1000):
        pool.callInThreadWithCallback(add, abs, -number)
    pool.stop()
    assert done[0] is not threading.current_thread()
    assert done[1:] == ["failed", *range(1000)]


def test_it_ends_without_a_start() -> None:
    OneThread("one").stop()


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_the_thread_survives_every_work(ending: type[BaseException]) -> None:
    pool, done = OneThread("one"), list[bool]()
    pool.start()

    def fail() -> None:
        raise ending

    for work in (fail, int):
        pool.callInThreadWithCallback(lambda good, _: done.append(good), work)
    pool.stop()
    assert done == [False, True]
