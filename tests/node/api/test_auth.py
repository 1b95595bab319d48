"""API keys: all given credentials must match, and the headers decide the caller's dialect."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.api.auth import Authenticator, Caller, Dialect, dialect
from node.base.errors import Forbidden, Unauthenticated
from node.keys.keyfile import Key, Scope, digest_of

KEY = "a long enough secret"
UUID = "b831381d-6324-4d53-ad4f-8cda48b30811"
SPELLINGS = (UUID, UUID.upper(), UUID.replace("-", ""), f"{{{UUID}}}", f"urn:uuid:{UUID}")


def accepts(key: str, bearer: str | None = None, x_api_key: str | None = None) -> bool:
    """Return whether a caller with these headers is accepted."""
    authorization = [] if bearer is None else [f"Bearer {bearer}"]
    keys = [] if x_api_key is None else [x_api_key]
    refused = list[str]()
    authenticator = Authenticator(key, refused=refused.append)
    lets_in = authenticator.lets_in(authorization, keys)
    assert not refused, "whoever answers the request counts it"
    try:
        authenticator.check(authorization, keys)
    except Unauthenticated:
        assert refused and not lets_in
        return False
    assert lets_in
    return True


def test_either_header_will_do() -> None:
    """The key is accepted as Bearer token or as x-api-key."""
    assert accepts(KEY, bearer=KEY)
    assert accepts(KEY, x_api_key=KEY)


def test_nothing_is_refused() -> None:
    """A request without a credential, or with empty ones, is refused."""
    assert not accepts(KEY)
    assert not accepts(KEY, bearer="", x_api_key="")


@pytest.mark.parametrize(
    ("bearer", "x_api_key"), [(KEY, "wrong"), ("wrong", KEY), (KEY, ""), ("", KEY), (KEY + "x", KEY)]
)
def test_both_headers_must_match(bearer: str, x_api_key: str) -> None:
    """A valid credential does not excuse a wrong one beside it."""
    assert not accepts(KEY, bearer, x_api_key)
    assert accepts(KEY, KEY, KEY)


def test_every_value_of_a_header_must_match() -> None:
    """If a header is given twice, both values must match."""
    with pytest.raises(Unauthenticated):
        Authenticator(KEY).check([], [KEY, "wrong"])
    with pytest.raises(Unauthenticated):
        Authenticator(KEY).check([f"Bearer {KEY}", "Bearer wrong"], [])


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "bEaReR   "])
def test_the_scheme_in_any_case(scheme: str) -> None:
    """The scheme is case-insensitive (RFC 9110, 11.1), and spaces around the token are ignored."""
    assert Authenticator(KEY).check([scheme + KEY], []).dialect is Dialect.DOCUMENT


@pytest.mark.parametrize("value", [KEY, f"Basic {KEY}", f"Bearer{KEY}", f"Token {KEY}", "Bearer", "Bearer "])
def test_other_schemes_are_refused(value: str) -> None:
    """The bare key, or the key under another scheme, is not a Bearer token."""
    with pytest.raises(Unauthenticated):
        Authenticator(KEY).check([value], [])


@pytest.mark.parametrize("key", SPELLINGS)
@pytest.mark.parametrize("presented", SPELLINGS)
def test_a_uuid_in_any_spelling(key: str, presented: str) -> None:
    """A key that is a UUID matches in every spelling, on both sides."""
    assert accepts(key, bearer=presented)
    assert not accepts(key, bearer=presented.replace("1", "2"))


@settings(deadline=None)
@given(st.uuids(), st.uuids())
def test_other_uuids_are_refused(key: uuid.UUID, presented: uuid.UUID) -> None:
    """A UUID is accepted only if it is the key."""
    assert accepts(str(key), x_api_key=presented.hex.upper()) == (key == presented)


@settings(deadline=None)
@given(st.text(min_size=16, max_size=40), st.text(max_size=40))
def test_other_keys_are_refused(key: str, presented: str) -> None:
    """A text is accepted only if it is the key, and is case-sensitive."""
    assert accepts(key, x_api_key=key)
    assert accepts(key, x_api_key=presented) == (key == presented)


def test_text_is_compared_exactly() -> None:
    """A key that is not a UUID is compared letter by letter."""
    assert not accepts(KEY, bearer=KEY.upper())
    assert not accepts(KEY, bearer=KEY[:-1])


def test_keys_of_any_script() -> None:
    """A key beyond ASCII works, and bytes that are not UTF-8 are a wrong key, not an error."""
    key = "ключ-ключ-ключ-ключ"
    assert accepts(key, bearer=key, x_api_key=key)
    assert not accepts(key, bearer=key.encode().decode("ascii", "surrogateescape")[:-1])
    assert accepts(key, x_api_key=key.encode().decode("ascii", "surrogateescape"))


@pytest.mark.parametrize(
    ("bearer", "x_api_key", "expected"),
    [
        ([f"Bearer {KEY}"], [], Dialect.DOCUMENT),
        ([], [KEY], Dialect.DEPLOYED),
        ([f"Bearer {KEY}"], [KEY], Dialect.DEPLOYED),
    ],
)
def test_the_dialect_follows_the_header(bearer: list[str], x_api_key: list[str], expected: Dialect) -> None:
    """A client that sends x-api-key is a deployed one, also with a Bearer token; others get the document's dialect."""
    assert Authenticator(KEY).check(bearer, x_api_key).dialect is expected


@pytest.mark.parametrize(("x_api_key", "expected"), [([], "DOCUMENT"), (["wrong"], "DEPLOYED"), ([""], "DEPLOYED")])
def test_a_refused_caller_has_a_dialect_too(x_api_key: list[str], expected: str) -> None:
    """A refusal is in the caller's dialect: the presence of x-api-key decides, valid or not."""
    assert dialect(x_api_key) is Dialect[expected]


def test_several_keys() -> None:
    """Each key has its own name and scope; API_KEY has scope all."""
    authenticator = Authenticator(KEY)
    ann, bob = Key("ann", Scope.READ, digest_of(UUID)), Key("bob", Scope.METRICS, digest_of("bob" * 9))
    assert authenticator.replace([ann, bob]) == set()
    assert authenticator.check([], [KEY]).key == Key("default", Scope.ALL, digest_of(KEY))
    assert authenticator.check([f"Bearer {UUID.upper()}"], []).key is ann
    assert authenticator.check([], ["bob" * 9]).key is bob
    for mixed in ([KEY, UUID], [UUID, "bob" * 9], [UUID, "wrong"]):
        with pytest.raises(Unauthenticated):
            authenticator.check([], mixed)
    assert authenticator.replace([bob]) == {ann}
    assert [authenticator.knows(key) for key in (ann, bob, *authenticator.fixed)] == [False, True, True]
    with pytest.raises(Unauthenticated):
        authenticator.check([], [UUID])


def test_no_key_at_all() -> None:
    """If no key is set, none is accepted, and not the empty one either."""
    for keys in ([], [""], ["x" * 20]):
        with pytest.raises(Unauthenticated):
            Authenticator().check([], keys)


def test_what_a_scope_takes() -> None:
    """A key may do what its scope and those before it allow; the refusal names the needed scope, and no key."""
    for has in Scope:
        caller = Caller(Key("ann", has, digest_of(UUID)))
        assert caller.controls == (has is Scope.ALL)
        for needed in Scope:
            if needed <= has:
                caller.require(needed)
            else:
                with pytest.raises(
                    Forbidden, match=f"the key ann has the scope {has.word}: this call needs {needed.word}"
                ):
                    caller.require(needed)


def test_a_certificate_instead() -> None:
    """With client certificates instead of keys, none is needed, but a wrong key is refused, and a valid one counts."""
    authenticator = Authenticator(KEY, certified=True)
    nobody = authenticator.check([], [])
    assert (nobody.key.name, nobody.key.scope, authenticator.knows(nobody.key)) == ("certificate", Scope.ALL, True)
    assert not Authenticator(KEY).knows(nobody.key)
    assert authenticator.check([], [KEY]).key.name == "default"
    for wrong in ("", "wrong"):
        with pytest.raises(Unauthenticated):
            authenticator.check([], [wrong])
