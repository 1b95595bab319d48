"""Reading a controller's text: comments and keys in any case, and nothing that stops at what cannot be read."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.json_text import fingerprint, parse
from drivers.xray.text import Hints, hints
from tests.harness.convert import refuses

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-100, 100)
    | st.text(max_size=8)
    | st.sampled_from(["//", "/*", "#", '"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
comments = st.sampled_from(["", " ", "// x\n", '/* " */', "# y\n", "/* // */", '//"\n', "/**/", "# /* \n"])


@settings(deadline=None)
@given(values, comments, comments)
def test_comments_are_left_out(value: Any, before: str, after: str) -> None:
    """A value with comments around it is the value; what looks like a comment inside a string stays."""
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
    """What an inbound says for its users is found in any case of keys and between comments."""
    assert hints(text, 1) == [Hints("f", "m")]


def test_a_hint_for_each_inbound() -> None:
    """Hints come in the order of the inbounds, empty for those that say nothing or something else."""
    inbounds = [{}, {"settings": {"flow": 1, "method": None}}, {"settings": {"flow": "f"}}, {"settings": []}]
    assert hints(json.dumps({"inbounds": inbounds}), 4) == [Hints(), Hints(), Hints("f"), Hints()]


@pytest.mark.parametrize("text", ["", "{", "nothing", "[]", '{"inbounds": []}', '{"inbounds": null}', "null", '"x"'])
def test_what_cannot_be_read_says_nothing(text: str) -> None:
    """Where the text cannot be read, or has other inbounds than the core found, there are no hints."""
    assert hints(text, 2) == [Hints(), Hints()]


@settings(deadline=None)
@given(st.text(max_size=40) | values.map(json.dumps), st.integers(0, 3))
def test_any_text_has_as_many_hints_as_inbounds(text: str, inbounds: int) -> None:
    """Whatever the text: there is one hint for each inbound of the core's."""
    assert len(hints(text, inbounds)) == inbounds


@pytest.mark.core
def test_deep_nesting() -> None:
    """A text that the core takes although it is nested deeper than Python reads says nothing."""
    text = '{"ignored": ' + "[" * 3000 + "]" * 3000 + "}"
    assert not refuses(text)
    assert hints(text, 0) == []


@pytest.mark.core
def test_an_open_comment_at_the_end() -> None:
    """A comment that never ends is a comment up to the end, as the core has it, and costs no more than its length."""
    text = "{} " + "/* " * 50_000
    assert not refuses(text)
    began = time.process_time()
    assert parse(text) == {}
    assert time.process_time() - began < 1


OPEN = '{"a":'


def test_fingerprint_of_deep_texts() -> None:
    """However deep a text is nested, it has a fingerprint; the order of keys counts where it is too deep to be read."""
    texts = [
        f'{{"x": {"[" * depth}1{"]" * depth}, "y": {OPEN * depth}1{"}" * depth}}}' for depth in range(10, 1500, 70)
    ]
    assert len({fingerprint(text) for text in texts}) == len(texts)


# Texts whose reading must cost no more than their length, however they are made.
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
    """Each character costs some microseconds and bytes, whatever is written."""
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
@given(st.dictionaries(st.text(st.characters(codec="ascii"), max_size=5), values, max_size=4), comments)
def test_equal_in_meaning(value: dict[str, Any], comment: str) -> None:
    """Order of keys, white space and comments make no other configuration."""
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
    """What a core may take for another configuration is another; keys that stand twice count in their order."""
    assert len({fingerprint(text) for text in DIFFERENT}) == len(DIFFERENT)
