"""Duration of a Start, from the call to the reply and to the first byte through the proxy, next to the core alone.

`python -m scripts.bench.start [USERS ...]` prints a table: medians of five runs each, in milliseconds. The floor is the
core alone, measured in the same run: conversion of the configuration, and the start from the converted message until
its API replies.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from scripts.bench import bare
from scripts.bench.stage import Backing, Cost, Stage, backing, first_byte, machine, median, processor, stage

ROUNDS = 5
SIZES = (1, 1_000, 10_000, 50_000)


def main(sizes: list[int]) -> None:
    print(machine())
    print(f"{'users':>7} {'Start':>7} {'first byte':>11} {'floor: convert':>15} {'core ready':>11}")
    with stage() as on:
        for size in sizes:
            row(on, backing(size))


def row(on: Stage, target: Backing) -> None:
    with on.client(target) as proxy:
        reply, byte = starts(on, target, proxy, ROUNDS)
    converted, ready = bare.starts(target.elsewhere(), target.crowd.users, on.directory, ROUNDS)
    milliseconds = [1000 * seconds for seconds in (reply.wall, byte.wall, converted, ready)]
    print("{:>7} {:>7.0f} {:>11.0f} {:>15.0f} {:>11.0f}".format(len(target.crowd.users), *milliseconds), flush=True)


def starts(on: Stage, target: Backing, proxy: int, rounds: int) -> tuple[Cost, Cost]:
    """Median costs of a Start after a Stop until its reply, and until the first byte."""
    replies, first = [], []
    for _ in range(rounds):
        on.controller.stop()
        reply, byte = start(on, target, proxy)
        replies.append(reply)
        first.append(byte)
    return median(replies), median(first)


def start(on: Stage, target: Backing, proxy: int) -> tuple[Cost, Cost]:
    request, node = target.request(), processor(on.node.node_pid)
    with ThreadPoolExecutor(1) as pool:
        begun = time.perf_counter()
        replied = pool.submit(lambda: (on.controller.start(request), time.perf_counter())[1])
        first_byte(target.ports[0], proxy, on.echo)
        byte = time.perf_counter() - begun
        reply = replied.result() - begun
    used = processor(on.node.node_pid) - node, processor(on.core)
    return Cost(reply, *used), Cost(byte, *used)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(SIZES))
