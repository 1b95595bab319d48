"""The key file: what is valid, what is not, and that no error repeats a key."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.keys.keyfile import MAX_KEYS, SCOPES, BadKeys, Key, Scope, digest_of, line_of, parse, parse_line

SECRET = "3f2b8c1e-0d5a-4b6f-9a77-1c2d3e4f5a6b"
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True)
KEYS = st.builds(Key, NAMES, st.sampled_from(Scope), st.binary(min_size=32, max_size=32))


def fault(text: str, *taken: Key) -> str:
    with pytest.raises(BadKeys) as bad:
        parse(text, taken)
    return str(bad.value)


@given(st.lists(KEYS, max_size=10, unique_by=(lambda key: key.name, lambda key: key.digest)))
def test_what_is_written_is_read(keys: list[Key]) -> None:
    """Formatted keys are parsed again, between comments and empty lines."""
    text = "# panels\n\n" + "\n \t# x\n".join(map(line_of, keys))
    assert parse(text) == tuple(keys)


@given(st.text(), st.text())
def test_anything_else_is_a_fault(before: str, after: str) -> None:
    """Any text is keys or a fault, and a fault does not repeat what may be a key."""
    secret = "a-secret-of-thirty-characters-"
    try:
        parse(f"{before}\nann all short\nbob {secret}\n{after} all {secret}")
    except BadKeys as bad:
        assert secret not in str(bad)
    else:
        pytest.fail("a line with two words passed")


@pytest.mark.parametrize("word", [SECRET, SECRET.upper(), SECRET.replace("-", ""), f"sha256:{digest_of(SECRET).hex()}"])
def test_a_key_by_hand(word: str) -> None:
    """A key may be in any spelling, or a digest, with any space between the words."""
    assert parse(f"  ann\tread   {word}\r\n") == (Key("ann", Scope.READ, digest_of(SECRET)),)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ann all", "NAME SCOPE KEY"),
        (f"ann all {SECRET} # old", "NAME SCOPE KEY"),
        (f"ann most {SECRET}", "the scope of ann must be one of metrics, read, all"),
        (f"ann ALL {SECRET}", "the scope of ann"),
        (f"-ann all {SECRET}", "a name has"),
        (f"{'a' * 65} all {SECRET}", "a name has"),
        ("ann all short", "fewer than 16"),
        (f"ann all {uuid.UUID(int=0)}", "nil UUID"),
        ("ann all sha256:12", "64 hexadecimal digits"),
        (f"ann all sha256:{'g' * 64}", "64 hexadecimal digits"),
    ],
)
def test_faults(line: str, told: str) -> None:
    """A bad line is reported by its number, and all bad lines are reported."""
    text = fault(f"# one\n{line}\nbob all x")
    assert "line 2: " in text
    assert "line 3: " in text
    assert told in text
    assert SECRET not in text


def test_two_of_one_kind() -> None:
    """No name and no key may come twice, or be that of API_KEY."""
    default = Key("default", Scope.ALL, digest_of(SECRET))
    other = uuid.uuid4()
    assert "two keys with the name ann" in fault(f"ann all {SECRET}\nann read {other}")
    assert "bob and ann are the same key" in fault(f"ann all {SECRET}\nbob read {SECRET.upper()}")
    assert "two keys with the name default" in fault(f"default all {other}", default)
    assert "ann and default are the same key" in fault(f"ann read {SECRET}", default)


def test_too_many() -> None:
    """There is a limit, because each request is compared with every key."""
    lines = [f"k{number} all {uuid.uuid4()}" for number in range(MAX_KEYS + 1)]
    assert len(parse("\n".join(lines[1:]))) == MAX_KEYS
    assert f"more than {MAX_KEYS} keys" in fault("\n".join(lines))


def test_scopes_rise() -> None:
    """Each scope includes those before it."""
    assert list(SCOPES) == ["metrics", "read", "all"]
    assert Scope.METRICS < Scope.READ < Scope.ALL
    assert parse_line("# ann all x") is None
