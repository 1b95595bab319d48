"""Latency of outbounds as the core measures it, over both transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from protos.service_pb2 import Latency
from scripts.staging.controller import Controller, refused
from scripts.staging.core import Json
from scripts.staging.inbounds import Kind
from scripts.staging.page import page
from scripts.staging.ports import free_port
from scripts.staging.wait import until
from tests.conftest import Place, run
from tests.harness import grounds
from tests.harness.grounds import GROUNDS, SING_BOX, XRAY, Ground


@pytest.fixture(scope="module", name="page")
def a_page() -> Iterator[str]:
    with page("127.0.0.1") as url:
        yield url


def observatory(page: str) -> Json:
    probes = {"subjectSelector": ["near", "gone"], "probeUrl": page, "probeInterval": "1s"}
    return {"observatory": {**probes, "enableConcurrency": True}, **_of_xray()}


def burst(page: str) -> Json:
    ping = {"destination": page, "interval": "1s", "sampling": 2, "timeout": "1s"}
    return {"burstObservatory": {"subjectSelector": ["near", "gone"], "pingConfig": ping}, **_of_xray()}


def _of_xray() -> Json:
    nowhere = {"servers": [{"address": "127.0.0.1", "port": free_port()}]}
    free = {"protocol": "freedom", "settings": {"finalRules": [{"action": "allow"}]}}
    gone = {"tag": "gone", "protocol": "socks", "settings": nowhere}
    return {"outbounds": [{**free, "tag": "other"}, {**free, "tag": "near"}, gone]}


def url_test(page: str) -> Json:
    return {
        "outbounds": [
            {"type": "direct", "tag": "other"},
            {"type": "direct", "tag": "near"},
            {"type": "socks", "tag": "gone", "server": "127.0.0.1", "server_port": free_port()},
            {"type": "urltest", "tag": "auto", "outbounds": ["near", "gone"], "url": page, "interval": "1s"},
        ]
    }


# By core: its ground, the configuration that measures, and the reply's name of it.
MEASURING: Mapping[str, tuple[Ground, Callable[[str], Json], str]] = {
    "observatory": (XRAY, observatory, "xray-observatory"),
    "burst": (XRAY, burst, "xray-observatory"),
    "urltest": (SING_BOX, url_test, "sing-box-urltest"),
}
# By core: what a configuration without measurements lacks.
LACKING = {"xray": "observatory", "sing-box": "urltest"}


def home(ground: Ground, all_kinds: Mapping[str, Kind]) -> Place:
    return Place(all_kinds["vless-raw"], "home", ground=ground)


def measured(controller: Controller) -> dict[str, Latency]:
    return {latency.name: latency for latency in controller.latency().latencies}


@pytest.mark.parametrize("way", MEASURING)
def test_what_is_measured(controller: Controller, all_kinds: Mapping[str, Kind], page: str, way: str) -> None:
    """Each measured outbound is listed, one alive and one not, also by name; others are not."""
    ground, configuration, source = MEASURING[way]
    run(controller, [home(ground, all_kinds)], **configuration(page))
    until(lambda: measured(controller).keys() == {"near", "gone"}, what="both were tried")
    until(lambda: measured(controller)["near"].alive, what="the one answers")
    near, gone = measured(controller)["near"], measured(controller)["gone"]
    assert (near.link, near.source) == ("near", source)
    assert 0 < near.delay < 5000
    assert not gone.alive
    assert near.last_seen_time == 0 or abs(near.last_seen_time - time.time()) < 60
    assert [latency.name for latency in controller.latency("near").latencies] == ["near"]
    with refused(404, "NOT_FOUND", "'other'"):
        controller.latency("other")


@pytest.mark.parametrize("ground", GROUNDS, ids=lambda ground: ground.name)
def test_nothing_is_measured(controller: Controller, all_kinds: Mapping[str, Kind], ground: grounds.Ground) -> None:
    """The error names what to add."""
    run(controller, [home(ground, all_kinds)])
    with refused(501, "UNIMPLEMENTED", LACKING[ground.name]):
        controller.latency()


def test_without_a_backend(controller: Controller) -> None:
    controller.stop()
    with refused(500, "UNAVAILABLE", "backend not initialized"):
        controller.latency()
