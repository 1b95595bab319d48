"""Checks of credentials, the certificate, and HTTP."""

from __future__ import annotations

import json
import ssl
import uuid
from contextlib import closing
from functools import partial

from protos.service_pb2 import Empty, StatResponse
from scripts.staging.target import Dialect
from tests.conformance import registry
from tests.conformance.context import Context
from tests.conformance.registry import Level, State
from tests.conformance.wire import Refused
from tests.harness.rest import Rest

check = partial(registry.check, "who-may-call")
of_errors = partial(registry.check, "errors")
of_operations = partial(registry.check, "operations")

# Panels accept no longer certificate.
PEM_CHARACTERS = 2048
WRONG_KEY = ("401", "UNAUTHENTICATED")


def refusal(context: Context, key: str, dialect: Dialect = "x-api-key") -> Refused:
    """The node's refusal of this key."""
    with closing(context.speak(key, dialect)) as stranger:
        try:
            stranger.call("GetBaseInfo", Empty())
        except Refused as error:
            return error
    raise AssertionError("the node accepts a wrong key, or none")


@check("key.x-api-key", Level.CONTROLLERS, state=State.STOPPED)
def x_api_key(context: Context) -> None:
    """The node accepts the key as `x-api-key`."""
    context.info()


@check("key.wrong", Level.CONTROLLERS, state=State.STOPPED)
def wrong_key(context: Context) -> None:
    """The node refuses a wrong key and a missing key."""
    refusal(context, str(uuid.uuid4()))
    refusal(context, "")


@check("key.bearer", Level.BEYOND, state=State.STOPPED)
def bearer(context: Context) -> None:
    """The node accepts the key as `Authorization: Bearer`, too."""
    with closing(context.speak(dialect="bearer")) as node:
        node.call("GetBaseInfo", Empty())


@check("key.wrong-status", Level.BEYOND, state=State.STOPPED)
def wrong_key_status(context: Context) -> None:
    """A wrong key, or none, is refused with 401 or UNAUTHENTICATED, in both headers."""
    dialects: tuple[Dialect, ...] = ("bearer", "x-api-key")
    for dialect in dialects:
        for key in (str(uuid.uuid4()), ""):
            error = refusal(context, key, dialect)
            assert error.status in WRONG_KEY, f"refused with {error}, expected 401 or UNAUTHENTICATED"


@of_operations("tls.certificate", Level.CONTROLLERS, ["rest"], State.STOPPED)
def certificate(context: Context) -> None:
    """The certificate's PEM has at most 2,048 characters, and is valid for the node's address."""
    with closing(context.rest.rest.connection()) as connection:
        connection.connect()
        shown = connection.sock.getpeercert(binary_form=True)
    assert shown
    length = len(ssl.DER_cert_to_PEM_cert(shown))
    assert length <= PEM_CHARACTERS, f"the PEM has {length} characters, at most {PEM_CHARACTERS} are allowed"


@of_operations("tls.h2-only", Level.CONTROLLERS, ["rest"], State.STOPPED)
def h2_only(context: Context) -> None:
    """A client that offers only `h2` in ALPN and then speaks HTTP/1.1 is served."""
    response = Rest(context.stage.options.node, dialect="x-api-key", alpn=["h2"]).call("GET", "/info")
    assert response.status == 200, f"{response.status}: {response.body[:200]!r}"


@of_errors("errors.plain-text", Level.CONTROLLERS, ["rest"], State.STOPPED)
def plain_text(context: Context) -> None:
    """With `x-api-key` the body of an error is only the text."""
    response = context.rest.rest.call("GET", "/stats/backend")
    assert response.text.strip() == "backend not initialized", f"{response.status}: {response.text!r}"


@of_errors("errors.json", Level.BEYOND, ["rest"], State.STOPPED)
def json_errors(context: Context) -> None:
    """With `Authorization` the body of an error is JSON with `error` and `code`."""
    text = Rest(context.stage.options.node).call("GET", "/stats/backend").text
    assert text.startswith("{"), f"the body is {text!r}"
    found = json.loads(text)
    assert found["error"] == "backend not initialized", found
    assert found["code"], found


@of_errors("errors.unknown-path", Level.BEYOND, ["rest"], State.STOPPED)
def unknown_path(context: Context) -> None:
    """The node replies to an unknown path with 404, to an invalid body with 400."""
    paths = {("GET", "/nothing"): 404, ("POST", "/start"): 400}
    found = {key: context.rest.rest.call(*key, b"\xff").status for key in paths}
    assert found == paths


@of_operations("stats.empty-body", Level.CONTROLLERS, ["rest"])
def empty_body(context: Context) -> None:
    """`GET /stats` without a body returns all outbounds, with or without a Content-Length."""
    context.traffic(context.anna)
    for body in (None, b""):
        context.soon(lambda body=body: "direct" in _outbounds(context, body), "the outbound is counted")


def _outbounds(context: Context, body: bytes | None) -> set[str]:
    response = context.rest.rest.call("GET", "/stats", body)
    assert response.status == 200, f"{response.status}: {response.body[:200]!r}"
    return {row.name for row in StatResponse.FromString(response.body).stats}
