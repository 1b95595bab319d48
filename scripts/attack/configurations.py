"""Fuzz the configuration code of both drivers: it must accept or refuse each case, with a reason and without delay.

Usage: python -m scripts.attack.configurations [cases] [seed]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from drivers.sing_box import config as sing_box
from drivers.xray import config as xray
from node.base.errors import InvalidConfig
from protos.xray_pb2 import Config, InboundHandlerConfig, OutboundHandlerConfig, TypedMessage
from scripts.attack import samples
from scripts.attack.mutation import bytes_of, flipped, mutate, text_of
from scripts.staging.core import ENVIRONMENT, find_xray

# The processor time that a case may take, in seconds. The rendered configuration may be GROWTH times as large as its
# source, plus ROOM bytes.
SECONDS = 2.0
GROWTH, ROOM = 4, 64 * 1024
_PORTS = range(20001, 20009)
_SING_BOX, _XRAY = json.dumps(samples.sing_box(*_PORTS)), json.dumps(samples.xray(*_PORTS))
TAKEN, REFUSED = "taken", "refused"


def sing_box_case(random: Random) -> str:
    """One case of sing-box, in any encoding. Returns `TAKEN` or `REFUSED`."""
    return _judged(bytes_of(mutate(_SING_BOX, random), random), _take_sing_box)


def xray_case(converted: bytes, random: Random) -> str:
    """One case of Xray: `converted` is its converter's output, whose parts are swapped, retyped and truncated."""
    text = text_of(mutate(_XRAY, random), random)
    version = random.choice(((26, 3, 27), (26, 9, 30)))
    return _judged(_spoiled(converted, random), lambda message: _take_xray(message, text, version))


def _judged(data: bytes, take: Callable[[bytes], int]) -> str:
    began = time.process_time()
    try:
        size = take(data)
    except InvalidConfig as error:
        assert 0 < len(str(error)) < 2000, "a reason is empty or too long"
        return REFUSED
    finally:
        assert time.process_time() - began < SECONDS, f"a case takes over {SECONDS} s of processor time"
    assert size < GROWTH * len(data) + ROOM, f"a configuration of {len(data)} bytes was rendered into {size}"
    return TAKEN


def _take_sing_box(formatted: bytes) -> int:
    plan = sing_box.plan(formatted, frozenset({"in-5"}), Path("/state/run"), True)
    assert plan.listens is not None and plan.exclusive is not None and plan.ports is not None
    assert plan.datagrams is not None and plan.sessions is not None and plan.detours is not None
    api = sing_box.ApiAddress(1, "secret", 2, 3)
    made = sing_box.render(plan, api, {tag: {} for tag in plan.tags})
    assert json.loads(made)["route"]["rules"][0]["action"] == "reject", "the first rule does not protect the APIs"
    return len(made)


def _take_xray(message: bytes, text: str, version: tuple[int, ...]) -> int:
    plan = xray.plan(message, text, frozenset({"ws"}), version)
    assert plan.exclusive is not None and plan.sessions is not None and plan.datagrams is not None
    made = xray.render(plan, xray.ApiAddress("/nowhere", "0123", direct=False), {tag: {} for tag in plan.tags})
    assert Config.FromString(made).inbound[-1].tag == "~txnode-in-0123", "the API's inbound is missing"
    return len(made)


def _spoiled(converted: bytes, random: Random) -> bytes:
    base = Config.FromString(converted)
    for _ in range(random.randint(1, 3)):
        random.choice((_spoil_value, _spoil_value, _spoil_type, _spoil_tag))(base, random)
    if random.random() < 0.1:
        _spoil_list(base, random)
    message = base.SerializeToString()
    return flipped(message, random) if random.random() < 0.2 else message


def _parts(base: Config) -> list[TypedMessage]:
    senders = [handler.sender_settings for handler in base.outbound]
    receivers = [handler.receiver_settings for handler in base.inbound]
    return [*base.app, *senders, *receivers, *(handler.proxy_settings for handler in _handlers(base))]


def _handlers(base: Config) -> list[InboundHandlerConfig | OutboundHandlerConfig]:
    return [*base.inbound, *base.outbound]


def _spoil_value(base: Config, random: Random) -> None:
    part, other = random.choice(_parts(base)), random.choice(_parts(base))
    part.value = random.choice((flipped(part.value, random), other.value, part.value * 2, b"", part.value[:-1]))


def _spoil_type(base: Config, random: Random) -> None:
    part, other = random.choice(_parts(base)), random.choice(_parts(base))
    part.type = random.choice((other.type, "", f"{part.type}.x", "xray.proxy.tun.Config", "\0", "x" * 5000))


def _spoil_tag(base: Config, random: Random) -> None:
    handlers = _handlers(base)
    random.choice(handlers).tag = random.choice((random.choice(handlers).tag, "", "~", "~txnode-x", "\0", "x" * 70_000))


def _spoil_list(base: Config, random: Random) -> None:
    if random.random() < 0.3:
        base.MergeFrom(Config.FromString(base.SerializeToString()))
    else:
        for parts in (base.inbound, base.outbound, base.app):
            del parts[random.randint(0, len(parts)) :]


def converted() -> bytes:
    """The sample as the core converts it to protobuf."""
    sink = os.memfd_create("converted")
    argv = [str(find_xray()), "convert", "pb", "-outpbfile", f"/dev/fd/{sink}", "stdin:"]
    text = _XRAY.replace("geoip:private", "10.0.0.0/8").encode()
    try:
        subprocess.run(argv, input=text, env=ENVIRONMENT, pass_fds=(sink,), check=True, stdout=subprocess.DEVNULL)
        return os.pread(sink, os.fstat(sink).st_size, 0)
    finally:
        os.close(sink)


def attack(cases: int, seed: int) -> Counter[str]:
    """Run so many cases, cores in turn; count the outcomes. Adds the case's number to an exception as a note."""
    message, outcomes = converted(), Counter[str]()
    for number in range(seed, seed + cases):
        case: Callable[[Random], str] = sing_box_case if number % 2 else lambda random: xray_case(message, random)
        try:
            outcomes[f"{'sing-box' if number % 2 else 'xray'} {case(Random(number))}"] += 1
        except Exception as error:
            error.add_note(f"case {number}")
            raise
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=1_000_000, help="how many (default: 1,000,000)")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="number of the first case (default: 0)")
    chosen = parser.parse_args()
    for what, times in sorted(attack(chosen.cases, chosen.seed).items()):
        print(f"{times:9} {what}")


if __name__ == "__main__":
    main()
