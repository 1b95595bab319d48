"""Checks of updates: deployed panels' buttons, and the same over the interface, without updating anything."""

from __future__ import annotations

import json
from functools import partial

from google.protobuf.message import Message

from protos.service_pb2 import GeoFile, JobRequest, UpdateCoreRequest, UpdateGeoFilesRequest, UpdateNodeRequest
from tests.conformance import registry
from tests.conformance.context import Context, LeftOut
from tests.conformance.registry import Level, State
from tests.conformance.wire import Refused
from tests.harness.rest import Response, Rest

check = partial(registry.check, "operations", state=State.STOPPED, optional=True)

BUTTONS = ("/node/update", "/node/core_update", "/node/geofiles", "/node/hard_reset")
OFF = ("403", "PERMISSION_DENIED")
# No node can carry these out, but one that allows updates takes a look at them.
IMPOSSIBLE: dict[str, Message] = {
    "UpdateCore": UpdateCoreRequest(version="0.0.1", back=True),
    "UpdateGeoFiles": UpdateGeoFilesRequest(files=[GeoFile(name="geoip.dat")], back=True),
    "UpdateNode": UpdateNodeRequest(version="0" * 10_000),
}


def press(context: Context, path: str, body: object, key: str | None = None) -> Response:
    """Press a button as a panel does, with JSON. Raises `Refused` if the node has no such path."""
    rest = Rest(context.stage.options.node, key, "x-api-key")
    reply = rest.call("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    if reply.status in (404, 405, 501):
        raise Refused(str(reply.status), reply.text)
    return reply


def detail(reply: Response) -> str:
    """The text that a panel shows of an error. Raises `AssertionError` if it is none."""
    assert reply.status >= 400, f"{reply.status}: {reply.text}"
    assert reply.text.startswith("{"), f"not JSON: {reply.text!r}"
    text = reply.json().get("detail")
    assert isinstance(text, str) and text, f"no `detail`: {reply.text!r}"
    return text


@check("buttons.reachable", Level.CONTROLLERS, ["rest"])
def reachable(context: Context) -> None:
    """`GET /` is answered with 200: panels ask it before each of their buttons."""
    reply = context.rest.rest.call("GET", "/")
    if reply.status == 404:
        raise Refused("404", reply.text)
    assert reply.status == 200, f"{reply.status}: {reply.text}"


@check("buttons.invalid", Level.CONTROLLERS, ["rest"])
def invalid(context: Context) -> None:
    """The buttons for core and geo files refuse an unknown version or region, with a JSON `detail` for the panel."""
    for path, body in (("core_update", {"core_version": "newest"}), ("geofiles", {"region": "mars"}), ("geofiles", [])):
        detail(press(context, f"/node/{path}", body))


@check("buttons.strangers", Level.CONTROLLERS, ["rest"])
def strangers(context: Context) -> None:
    """Each of the four buttons, the hard reset too, refuses a wrong key."""
    for path in BUTTONS:
        reply = press(context, path, {}, key="a wrong key of a stranger")
        assert reply.status in (401, 403), f"{path}: {reply.status}: {reply.text}"


@check("buttons.off", Level.CONTROLLERS, ["rest"])
def buttons_off(context: Context) -> None:
    """On a node that refuses updates the buttons for node, core and geo files are refused with 403 and a `detail`."""
    tried = {
        "UpdateNode": ("/node/update", {}),
        "UpdateCore": ("/node/core_update", {"core_version": "latest"}),
        "UpdateGeoFiles": ("/node/geofiles", {"region": "iran"}),
    }
    # Pressing one that is on would update the node.
    pressed = {name: button for name, button in tried.items() if refusal(context, name).status in OFF}
    for path, body in pressed.values():
        reply = press(context, path, body)
        assert detail(reply) and reply.status == 403, f"{path}: {reply.status}: {reply.text}"
    if not pressed:
        raise LeftOut("the node allows updates: pressing a button would make one")


@check("updates.refused", Level.BEYOND)
def refused(context: Context) -> None:
    """Impossible updates of core, geo files and node are refused before a job begins, or because updates are off."""
    jobs = {job.id for job in context.node.call("GetJob", JobRequest()).jobs}
    for name in IMPOSSIBLE:
        error = refusal(context, name)
        assert error.status in ("400", "INVALID_ARGUMENT", *OFF), f"{name}: {error}"
    after = {job.id for job in context.node.call("GetJob", JobRequest()).jobs}
    assert after == jobs, f"jobs have begun: {after - jobs}"


def refusal(context: Context, name: str) -> Refused:
    """The node's refusal of an impossible update."""
    try:
        context.node.call(name, IMPOSSIBLE[name])
    except Refused as error:
        if error.lacking:
            raise
        return error
    raise AssertionError(f"{name} succeeds with {str(IMPOSSIBLE[name])[:100]}")
