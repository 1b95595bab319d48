"""Parse a controller's text: comments, keys in any case, and no error for text that cannot be parsed."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.process.json_text import fingerprint, parse
from drivers.xray.text import Hints, hints
from tests.harness.convert import refuses

# Keys do not differ in case alone: the meaning of such keys depends on their order.
keys = st.text(max_size=5).map(str.lower)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-100, 100)
    | st.text(max_size=8)
    | st.sampled_from(["//", "/*", "#", '"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
comments = st.sampled_from(["", " ", "// x\n", '/* " */', "# y\n", "/* // */", '//"\n', "/**/", "# /* \n"])


@settings(deadline=None)
@given(values, comments, comments)
def test_comments_are_left_out(value: Any, before: str, after: str) -> None:
    """Comments around a value are removed; what looks like one inside a string stays."""
    assert parse(before + json.dumps(value) + after) == value
    assert parse(before + json.dumps(value, ensure_ascii=False) + after) == value


@settings(deadline=None)
@given(st.lists(values, max_size=4), comments)
def test_comments_between(parts: list[Any], comment: str) -> None:
    """Comments may stand between the parts of a value."""
    text = f"[{comment}" + f"{comment},{comment}".join(map(json.dumps, parts)) + f"{comment}]"
    assert parse(text) == parts


SAME = [
    '{"inbounds": [{"settings": {"flow": "f", "method": "m"}}]}',
    '{"InBounds": [{"SETTINGS": {"Flow": "f", "mEthod": "m"}}]}',
    '// {"inbounds": []}\n{"inbounds": [/* one */ {"settings": {"flow": "f", # "method": "x"\n "method": "m"}}]}',
]


@pytest.mark.parametrize("text", SAME)
def test_hints_of_an_inbound(text: str) -> None:
    """An inbound's defaults for users are found with keys in any case and between comments."""
    assert hints(text, 1) == [Hints("f", "m")]


def test_a_hint_for_each_inbound() -> None:
    """Hints come in the order of the inbounds, empty for those without or with others."""
    inbounds = [{}, {"settings": {"flow": 1, "method": None}}, {"settings": {"flow": "f"}}, {"settings": []}]
    assert hints(json.dumps({"inbounds": inbounds}), 4) == [Hints(), Hints(), Hints("f"), Hints()]


@pytest.mark.parametrize("text", ["", "{", "nothing", "[]", '{"inbounds": []}', '{"inbounds": null}', "null", '"x"'])
def test_unreadable_text_gives_no_hints(text: str) -> None:
    """A text that cannot be parsed, or has other inbounds than the core found, gives no hints."""
    assert hints(text, 2) == [Hints(), Hints()]


@settings(deadline=None)
@given(st.text(max_size=40) | values.map(json.dumps), st.integers(0, 3))
def test_any_text_has_as_many_hints_as_inbounds(text: str, inbounds: int) -> None:
    """Any text gives one hint for each inbound of the core."""
    assert len(hints(text, inbounds)) == inbounds


@pytest.mark.core
def test_deep_nesting() -> None:
    """A text that the core accepts, but nested too deeply for Python, gives no hints."""
    text = '{"ignored": ' + "[" * 3000 + "]" * 3000 + "}"
    assert not refuses(text)
    assert hints(text, 0) == []


@pytest.mark.core
def test_an_open_comment_at_the_end() -> None:
    """An unterminated comment extends to the end, as in the core, and takes linear time."""
    text = "{} " + "/* " * 50_000
    assert not refuses(text)
    began = time.process_time()
    assert parse(text) == {}
    assert time.process_time() - began < 1


OPEN = '{"a":'


def test_fingerprint_of_deep_texts() -> None:
    """Every depth of nesting has its own fingerprint; in texts too deep to parse the order of keys counts."""
    texts = [
        f'{{"x": {"[" * depth}1{"]" * depth}, "y": {OPEN * depth}1{"}" * depth}}}' for depth in range(10, 1500, 70)
    ]
    assert len({fingerprint(text) for text in texts}) == len(texts)


# Texts that must be parsed in linear time.
LONG = {
    "quotes of no string": '\\"' * 35_000,
    "escapes without an end": '"' + "\\n" * 35_000,
    "an escape at the end": '"' * 69_999 + "\\",
    "quotes": '"' * 70_000,
    "slashes": "/" * 70_000,
    "open comments": "/*" * 35_000,
    "a long string": json.dumps("x" * 70_000),
    "a long string of escapes": json.dumps("\n" * 35_000) + "// and a comment",
    "objects": "[" + ",".join(["{}"] * 23_000) + "]",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_what_reading_costs(text: str) -> None:
    """Any text takes linear time and memory."""
    tracemalloc.start()
    try:
        began = time.process_time()
        fingerprint(text)
        hints(text, 0)
        assert time.process_time() - began < 5
        assert tracemalloc.get_traced_memory()[1] < 100 * len(text)
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(st.dictionaries(keys.filter(str.isascii), values, max_size=4), comments)
def test_equal_in_meaning(value: dict[str, Any], comment: str) -> None:
    """The order of keys, white space and comments do not change the fingerprint."""
    turned = json.dumps(dict(reversed(value.items())), indent=1)
    assert fingerprint(json.dumps(value)) == fingerprint(comment + turned + comment)


DIFFERENT = [
    "{}",
    "",
    "{",
    '{"a": 1}',
    '{"a": "1"}',
    '{"a": [1]}',
    '{"a": [[1]]}',
    '{"a": {"b": 1}}',
    '{"a": {"B": 1}}',
    '{"a": 1, "a": 2}',
    '{"a": 2, "a": 1}',
    '{"log": {"access": "x"}, "LOG": {"access": "y"}}',
    '{"LOG": {"access": "y"}, "log": {"access": "x"}}',
    '{"a": ' * 400 + "1" + "}" * 400,
    '{"a": ' * 400 + "2" + "}" * 400,
    '{"a": ' * 4000 + "1" + "}" * 4000,
    '{"a": ' * 4000 + "2" + "}" * 4000,
]


def test_different_in_meaning() -> None:
    """Configurations that differ for a core have different fingerprints; the order of duplicate keys counts."""
    assert len({fingerprint(text) for text in DIFFERENT}) == len(DIFFERENT)
