"""Checks of Start, Stop, and the node's info."""

from __future__ import annotations

import json
import re
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from protos.service_pb2 import Backend, BaseInfoResponse, Empty
from scripts.staging import transfer
from scripts.staging.ports import free_port
from scripts.staging.wait import accepts
from tests.conformance import registry
from tests.conformance.context import Context
from tests.conformance.registry import Level, State
from tests.conformance.stage import TROJAN, VLESS
from tests.conformance.wire import Refused

check = partial(registry.check, "start-stop-and-states")
of_limits = partial(registry.check, "limits")

# Controllers do not use chunked calls with older nodes.
OLDEST = (0, 2, 0)
MEBIBYTE = 1024 * 1024


def runs(info: BaseInfoResponse) -> None:
    assert info.running, "`running` is not true"
    assert info.core_version, "`core_version` is empty"
    assert re.match(r"v?\d+\.\d+\.\d+", info.version), f"`version` is {info.version!r}"
    number = tuple(int(part) for part in re.findall(r"\d+", re.split("[-+]", info.version)[0])[:3])
    assert number >= OLDEST, f"`version` is {info.version!r}"


def refusal(context: Context, name: str) -> Refused:
    """The refusal of an operation without arguments."""
    try:
        context.node.call(name, Empty())
    except Refused as error:
        return error
    raise AssertionError(f"{name} succeeds although no core runs")


@check("start.info", Level.CONTROLLERS, state=State.STOPPED)
def start_info(context: Context) -> None:
    """Start replies that the core runs, with its version and the node's, which is at least 0.2.0."""
    runs(context.start())


@check("info.running", Level.CONTROLLERS)
def info_running(context: Context) -> None:
    """GetBaseInfo returns the same while the core runs."""
    runs(context.info())


@check("info.stopped", Level.CONTROLLERS, state=State.STOPPED)
def info_stopped(context: Context) -> None:
    """After a Stop GetBaseInfo returns that nothing runs."""
    assert not context.info().running


@check("info.notes", Level.BEYOND)
def info_notes(context: Context) -> None:
    """GetBaseInfo's `notes`, if any, are lines about the running configuration, the same for each call; none is left
    after a Stop.
    """
    begun = list(context.start(context.member(context.anna)).notes)
    assert begun == list(context.info().notes), "the notes of Start and of GetBaseInfo differ"
    assert all(note.strip() and note.isprintable() for note in begun), f"a note is no line of text: {begun}"
    context.stop()
    assert not context.info().notes, f"notes of a stopped backend: {context.info().notes}"


@check("start.after-stop", Level.CONTROLLERS)
def start_after_stop(context: Context) -> None:
    """After Stop and Start, as panels send them for every change, also twice, users can connect."""
    context.comes_in(context.anna)
    for _ in range(2):
        context.stop()
        context.start(context.member(context.bert))
        context.comes_in(context.bert)
    context.stays_out(context.anna)


@check("start.again", Level.CONTROLLERS)
def start_again(context: Context) -> None:
    """The same Start a second time gets the same reply, and its users can connect."""
    runs(context.start(context.member(context.anna)))
    context.comes_in(context.anna)


@check("stop.users-out", Level.BEYOND)
def stop_users_out(context: Context) -> None:
    """A Stop with `Authorization` ends connections, and no user can connect after it."""
    with context.connect(context.anna) as link:
        _stop_plainly(context)
        readable, _, _ = select.select([link], [], [], context.stage.options.patience)
        assert readable, "a connection survives a Stop"
    context.stays_out(context.anna)


def _stop_plainly(context: Context) -> None:
    """Stop with `Authorization`, or with `x-api-key` if the node does not support that."""
    try:
        with closing(context.speak(dialect="bearer")) as node:
            node.call("Stop", Empty())
    except Refused:
        context.stop()


@check("start.again-connected", Level.BEYOND)
def start_again_connected(context: Context) -> None:
    """The same Start disconnects no user, also after a Stop."""
    with context.connect(context.anna) as link:
        context.start(context.member(context.anna))
        transfer.small_echo(link, b"after a Start")
        context.stop()
        context.start(context.member(context.anna))
        transfer.small_echo(link, b"after Stop and Start")


@check("start.exclude-inbounds", Level.CONTROLLERS, state=State.STOPPED, cores=["xray"])
def exclude_inbounds(context: Context) -> None:
    """Inbounds that a Start excludes keep the users of the configuration, and accept no others."""
    backend = context.stage.backend([context.member(context.anna)], exclude=[TROJAN])
    config = json.loads(backend.config)
    [trojan] = [inbound for inbound in config["inbounds"] if inbound["tag"] == TROJAN]
    trojan["settings"]["clients"] = [context.stage.doors[TROJAN].account(context.bert)]
    backend.config = json.dumps(config)
    context.node.call("Start", backend)
    context.comes_in(context.anna)
    context.need_traffic()
    context.comes_in(context.bert, TROJAN)
    context.stays_out(context.anna, TROJAN)


@check("start.another", Level.BEYOND)
def start_another(context: Context) -> None:
    """A Start with another configuration disconnects no user whom it keeps."""
    other = context.stage.backend([context.member(context.anna)])
    with context.connect(context.anna) as link:
        context.node.call("Start", context.stage.renamed(other, VLESS, "elsewhere"))
        transfer.small_echo(link, b"after another Start")
        context.comes_in(context.anna)


@check("start.refused", Level.CONTROLLERS)
def start_refused(context: Context) -> None:
    """A configuration that the core refuses is refused with a text, and the next Start works."""
    text = _refused_start(context)
    assert text, "the refusal has no text"
    context.start(context.member(context.anna))
    context.comes_in(context.anna)


@check("start.refused-untouched", Level.BEYOND)
def start_refused_untouched(context: Context) -> None:
    """A refused Start leaves the running backend unchanged."""
    with context.connect(context.anna) as link:
        _refused_start(context)
        transfer.small_echo(link, b"after a refused Start")
    assert context.info().running
    context.comes_in(context.anna)


def _refused_start(context: Context) -> str:
    ground = context.stage.ground
    try:
        context.node.call("Start", Backend(type=ground.type, config=ground.refusals["an unknown outbound"][0]))  # type: ignore[arg-type]
    except Refused as error:
        return error.text
    raise AssertionError("a configuration with an unknown outbound is accepted")


@check("health.stopped", Level.CONTROLLERS, state=State.STOPPED)
def health_stopped(context: Context) -> None:
    """Without a backend GetBackendStats is refused with `backend not initialized`, 500 or UNAVAILABLE."""
    error = refusal(context, "GetBackendStats")
    assert "backend not initialized" in error.text, str(error)
    assert error.status in ("500", "UNAVAILABLE"), str(error)


@check("health.starting", Level.BEYOND, state=State.STOPPED, local=True)
def health_starting(context: Context) -> None:
    """While a Start waits for a port GetBackendStats returns `core is not started yet`; then the core runs."""
    port, host, ground = free_port(), context.stage.options.clients, context.stage.ground
    backend = ground.backend([{**ground.inbound(context.stage.doors[VLESS], port, VLESS), "listen": host}])
    with ThreadPoolExecutor(1) as pool:
        with socket.create_server((host, port)):
            start = pool.submit(context.node.call, "Start", backend)
            context.soon(lambda: "core is not started yet" in refusal(context, "GetBackendStats").text, "the words")
        runs(start.result())
    assert accepts(port, host)


@check("keep-alive", Level.BEYOND, state=State.STOPPED)
def keep_alive(context: Context) -> None:
    """The node stops the backend after `keep_alive` seconds without a request."""
    context.start(keep_alive=1)
    port, host = context.stage.ports[VLESS], context.stage.options.clients
    context.need_traffic()
    assert accepts(port, host), "the inbound does not listen"
    context.soon(lambda: not accepts(port, host), "the inbound is closed")
    assert not context.info().running


@of_limits("messages.large", Level.BEYOND)
def large(context: Context) -> None:
    """The node accepts a message of nearly 64 MiB."""
    anna = context.member(context.anna)
    anna.inbounds.extend(str(number) + "x" * MEBIBYTE for number in range(62))
    context.replace(anna)
    context.comes_in(context.anna)
