"""Prose rule: some words of a private language must not occur in comments, docstrings, logs, errors and documents."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# A pattern, and what to write instead, with the reason where the better word does not show it.
RULES: tuple[tuple[str, str], ...] = (
    (r"nobody", "name who or what is absent: no user, no connection, no controller, no process"),
    (r"everybody", "all users, all connections, ..."),
    (r"whoever", "name the actor: a user who, the caller, a client that"),
    (r"anew|once more", "again"),
    (r"shall", "must, will or may: it leaves open whether it is a duty or a forecast"),
    (r"told", "report, return, log, receive, distinguish; name the actor"),
    (r"(?:is|are|was|were|be|been) said", "the node logs, reports or replies; the operator sets"),
    (r"(?:he|him|his)", "a user is they"),
    (r"hears? (?:of|that|when|why|it)", "learns, receives, notices"),
    (r"wh(?:o|at) (?:is|was) \w+(?: \w+)? (?:is|was)", "name the subject: a removed user is, the result is"),
    (r"(?:that|which|what) (?:is|are) none", "invalid, missing, unknown, another kind of"),
    (r"in good order", "cleanly"),
    (r"unasked(?: for)?", "by itself, by default; a run that ends so has crashed"),
)
FORBIDDEN = re.compile(
    "|".join(rf"(?P<rule{place}>\b{rule}\b)" for place, (rule, _) in enumerate(RULES)), re.IGNORECASE
)

_LOGS = {"debug", "info", "warn", "warning", "error", "failure", "critical", "event"}
_CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL)


class Found(NamedTuple):
    """A forbidden word in a file of the repository."""

    file: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word!r}: {self.instead}"


def files() -> Iterator[Path]:
    """The Python files and the documents of the repository, without generated ones."""
    for folder in ("node", "drivers", "scripts", "tests", "twisted"):
        yield from sorted((ROOT / folder).rglob("*.py"))
    yield ROOT / "scripts" / "docs"
    yield from (ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))
    yield from (*sorted((ROOT / "changes").glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """The lines of comments and docstrings, and of string literals in log calls and `raise` statements."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], _prose(token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from _lines(node.value)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _literals(node.exc)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOGS:
            yield from _literals(node)


def _literals(call: ast.Call) -> Iterator[tuple[int, str]]:
    for part in ast.walk(call):
        if isinstance(part, ast.Constant):
            yield from _lines(part)


def _lines(constant: ast.Constant) -> Iterator[tuple[int, str]]:
    if isinstance(constant.value, str):
        yield from enumerate(_prose(constant.value).split("\n"), constant.lineno)


def _prose(text: str) -> str:
    """The text without code, comments of Markdown and targets of links, with the same lines."""
    return _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)


def texts_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a document without code, comments and targets of links."""
    return enumerate(_prose(source).split("\n"), 1)


def forbidden(source: str, markdown: bool = False) -> Iterator[tuple[int, str, str]]:
    """Each forbidden word: its line, the word, and what to write instead."""
    for line, text in texts_of_markdown(source) if markdown else texts_of_python(source):
        for match in FORBIDDEN.finditer(text):
            assert match.lastgroup
            yield line, match[0], RULES[int(match.lastgroup.removeprefix("rule"))][1]


@functools.cache
def findings() -> tuple[Found, ...]:
    """All forbidden words of the repository."""
    found = []
    for file in files():
        source = file.read_text()
        if FORBIDDEN.search(source):
            name = str(file.relative_to(ROOT))
            found += [Found(name, *each) for each in sorted(set(forbidden(source, file.suffix == ".md")))]
    return tuple(found)


def test_no_forbidden_words() -> None:
    """No file has any of the words."""
    assert not findings(), "\n".join(map(str, findings()))


def test_what_is_read_of_python() -> None:
    """Comments, docstrings and texts of logs and errors count; other strings and names do not."""
    source = '''
nobody = "whoever"  # shall `anew`
def his():
    """Anew.

    Nobody."""
    log.info("who is {x} is told", f"{nobody} everybody")
    raise Error(f"{nobody}: told")
'''
    assert [(line, word) for line, word, _ in sorted(forbidden(source))] == [
        (2, "shall"),
        (4, "Anew"),
        (6, "Nobody"),
        (7, "everybody"),
        (7, "told"),
        (8, "told"),
    ]


def test_what_is_read_of_documents() -> None:
    """Code, comments and targets of links do not count; line numbers hold behind them."""
    source = "Shall\n```\nnobody\n```\n`told` <!-- told --> [a](told.md)\nWho is out is barred."
    assert [(line, word) for line, word, _ in forbidden(source, markdown=True)] == [(1, "Shall"), (6, "Who is out is")]
