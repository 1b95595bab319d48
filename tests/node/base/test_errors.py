"""The errors of calls: unique codes, valid statuses, and the texts that clients match."""

from __future__ import annotations

import inspect
import re
from http import HTTPStatus

import grpc
import pytest

from node.base import errors
from node.base.errors import KINDS, NodeError

# The code, REST's status and gRPC's, for every kind: the documentation and clients rely on them.
TABLE = {
    "internal": (500, "INTERNAL"),
    "unauthenticated": (401, "UNAUTHENTICATED"),
    "forbidden": (403, "PERMISSION_DENIED"),
    "invalid_request": (400, "INVALID_ARGUMENT"),
    "invalid_config": (400, "INVALID_ARGUMENT"),
    "not_found": (404, "UNIMPLEMENTED"),
    "unknown_name": (404, "NOT_FOUND"),
    "method_not_allowed": (405, "UNIMPLEMENTED"),
    "request_timeout": (408, "DEADLINE_EXCEEDED"),
    "too_large": (413, "RESOURCE_EXHAUSTED"),
    "crowded": (503, "RESOURCE_EXHAUSTED"),
    "unsupported_media_type": (415, "INVALID_ARGUMENT"),
    "unsupported": (501, "UNIMPLEMENTED"),
    "backend_not_initialized": (500, "UNAVAILABLE"),
    "core_not_started": (503, "UNAVAILABLE"),
    "core_failed": (500, "UNAVAILABLE"),
    "users_refused": (500, "INTERNAL"),
    "aborted": (409, "ABORTED"),
    "shutting_down": (503, "UNAVAILABLE"),
}


def test_all_codes() -> None:
    """Every code, with its statuses, is the one that is listed here."""
    assert {kind.code: (kind.http, kind.grpc) for kind in KINDS} == TABLE
    assert len(KINDS) == len(TABLE)


def test_every_kind_is_listed() -> None:
    """No error of the module is missing in the list; `PortTaken` is a failed core for a caller."""
    defined = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, NodeError)}
    assert defined - {NodeError, errors.PortTaken} == set(KINDS)
    assert (errors.PortTaken.code, errors.PortTaken.http) == (errors.CoreFailed.code, errors.CoreFailed.http)


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_statuses_exist(kind: type[NodeError]) -> None:
    """A code is a plain word, its statuses exist in HTTP and gRPC, and the class has a docstring."""
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
    assert HTTPStatus(kind.http) >= HTTPStatus.BAD_REQUEST
    assert grpc.StatusCode[kind.grpc] is not grpc.StatusCode.OK
    assert kind.__doc__


def test_no_backend() -> None:
    """Deployed controllers match exactly this text for a node without a backend."""
    assert errors.NotInitialized().text == "backend not initialized"


def test_core_not_started() -> None:
    """Deployed controllers do not act on a node with this text, so the reason comes after it."""
    assert errors.NotStarted("it was killed").text == "core is not started yet: it was killed"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not errors.NotStarted])
def test_no_other_error_begins_like_that(kind: type[NodeError]) -> None:
    """No other error has the text that makes controllers wait."""
    plain = kind in (errors.NotInitialized, errors.ShuttingDown, errors.Unauthenticated, errors.Aborted)
    made = errors.UsersRefused([("ann", "why")]) if kind is errors.UsersRefused else kind(*([] if plain else ["why"]))
    assert "core is not started yet" not in made.text
    assert str(made) == made.text


def test_refused_users_are_named() -> None:
    """The text begins as controllers match it and names users with their reasons; the error has all of them."""
    refused = [("ann", "bad id"), ("bob", "same credential")]
    error = errors.UsersRefused(refused)
    assert error.text == "failed to update users: 'ann': bad id; 'bob': same credential"
    assert error.refused == refused


def test_many_refused_users_are_counted() -> None:
    """A text is bounded: beyond a number of names it says how many more there are."""
    listed = errors.UsersRefused.LISTED
    whole, cut = (errors.UsersRefused([(f"u{n}", "no") for n in range(listed + more)]) for more in (0, 5))
    assert "more" not in whole.text
    assert cut.text.endswith("; and 5 more")
    assert f"'u{listed - 1}'" in cut.text
    assert f"'u{listed}'" not in cut.text


ODD = ["x", "я", "\U0001f600", "\n", "%", "\ud800", "\u202e"]


@pytest.mark.parametrize("character", ODD)
def test_texts_are_bounded(character: str) -> None:
    """A text of any length and script fits: as gRPC encodes it, it has at most 4 kB, and its beginning is kept."""
    for length in (10, 500, 4000, 1_000_000):
        error = errors.CoreFailed("it said: " + character * length)
        assert errors.size(error.text) <= errors.MAX_TEXT
        assert error.text.startswith("it said: " + character * 10)
        assert error.text.endswith("…") is (errors.size(character) * length > errors.MAX_TEXT - 10)
        assert str(error) == error.text


@pytest.mark.parametrize("character", ODD)
def test_long_names_and_reasons_are_cut(character: str) -> None:
    """However long names and reasons are, a text names users first and ends with how many more there are."""
    refused = [(f"u{n}{character * 1000}", character * 1000) for n in range(60)]
    text = errors.UsersRefused(refused).text
    assert text.startswith("failed to update users: 'u0")
    assert errors.size(text) <= errors.MAX_TEXT
    named, more = text.count("; 'u") + 1, int(text.rpartition("; and ")[2].removesuffix(" more"))
    assert named + more == 60
    assert named >= 2


def test_names_are_cut() -> None:
    """A name is quoted, with at most 100 characters."""
    assert errors.shown("ann's") == '"ann\'s"'
    assert errors.shown("x" * 100) == repr("x" * 100)
    assert errors.shown("x" * 101) == repr("x" * 100) + "…"
