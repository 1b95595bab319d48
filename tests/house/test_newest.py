"""The report on a core's newest release: which tests fail, and what changed in its configuration and its API."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click import ClickException

from drivers.install.releases import CORES
from scripts import newest
from scripts.newest import MOST, TESTED, changed, failures, fields, report

TAGS = """1\trefs/tags/v1.9.0
2\trefs/tags/v1.10.0
3\trefs/tags/v1.11.0-beta.1
4\trefs/tags/v1.10.0^{}
5\trefs/tags/other
"""


def test_the_newest_release() -> None:
    """By number, and none of the previews."""
    assert newest.newest(TAGS) == "1.10.0"
    with pytest.raises(ClickException, match="no tags"):
        newest.newest("1\trefs/tags/v1\n")


def test_every_core_has_its_row() -> None:
    assert TESTED.keys() == CORES.keys()


def test_arguments_of_pytest_are_passed_on() -> None:
    given = newest.main.make_context("newest", ["xray", "-n", "8", "--dist", "loadfile", "tests/live"]).params
    assert given["arguments"] == ("-n", "8", "--dist", "loadfile", "tests/live")


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.live.test_one" name="test_a[xray]"/>
<testcase classname="tests.live.test_one" name="test_b">
<failure message="AssertionError: 1 == 2&#10;more">x</failure></testcase>
<testcase classname="tests.live.test_two" name="test_c"><error message="no core">x</error></testcase>
<testcase classname="tests.live.test_two" name="test_d"><skipped message="later"/></testcase>
</testsuite></testsuites>"""


def test_the_tests_that_fail() -> None:
    """A test that cannot even begin has failed as well; one that was left out did not run."""
    failed = {"tests/live/test_one.py::test_b": "AssertionError: 1 == 2", "tests/live/test_two.py::test_c": "no core"}
    assert failures(JUNIT) == (3, failed)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository of a core with two releases."""
    repository = tmp_path / "core"

    def git(*words: str) -> None:
        identity = ("-c", "user.name=test", "-c", "user.email=test@test")
        subprocess.run(["git", "-C", repository, *identity, *words], check=True, capture_output=True)

    (repository / "option").mkdir(parents=True)
    git("init")
    for version, name, field in (("1.0.0", "old", "1"), ("1.1.0", "new", "2")):
        (repository / "option" / "a.go").write_text(f'A string `json:"{name},omitempty"`\nB int `json:"same"`\n')
        (repository / "option" / "a_test.go").write_text(f'A string `json:"{name}_test"`\n')
        (repository / "b.proto").write_text(
            f"// About {name}.\noption go = 'v{field}';\nmessage M {{ string {name} = {field}; }}\n"
        )
        git("add", ".")
        git("commit", "-m", version)
        git("tag", f"v{version}")
    return repository


def test_what_changed(source: Path) -> None:
    """Fields that came and went, by name, and lines of the API without comments; not what is the same, or a test's."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", source, *words], check=True, capture_output=True, text=True).stdout

    before, after = (fields(git("grep", 'json:"', tag, "--", "option/*.go")) for tag in ("v1.0.0", "v1.1.0"))
    assert before == {"old": "option/a.go", "same": "option/a.go"}
    api = git("diff", "--unified=0", "v1.0.0", "v1.1.0", "--", "*.proto")
    assert changed(api) == ["# b.proto", "-message M { string old = 1; }", "+message M { string new = 2; }"]
    text = report("Core 1.1.0", 3, {"test_a": "it fails"}, before, after, api)
    assert [line for line in text.split("\n") if line] == [
        "## Core 1.1.0",
        "### 1 of 3 tests fail",
        "- `test_a`: it fails",
        "### New fields of the configuration: 1",
        "- `new` (option/a.go)",
        "### Fields that are gone: 1",
        "- `old` (option/a.go)",
        "### Changed lines of the API: 3",
        "```diff",
        "# b.proto",
        "-message M { string old = 1; }",
        "+message M { string new = 2; }",
        "```",
    ]


def test_comments_alone_are_no_change() -> None:
    assert changed("+++ b/a.proto\n@@ -1 +1 @@\n-// one\n+// two\n") == []
    assert changed("") == []


def test_a_report_has_an_end() -> None:
    """A summary that is too large is not shown at all."""
    many = {f"field{number}": "a.go" for number in range(MOST + 5)}
    text = report("Core", 1, {}, {}, many, "+++ b/a.proto\n" + "+ int a = 1;\n" * 5000)
    assert len(text.split("\n")) < 3 * MOST and "- and 5 more" in text
