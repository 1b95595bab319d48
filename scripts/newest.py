"""Test the newest release of a core, and report what changed: `python -m scripts.newest xray` in a clone, with cores.

It builds the newest tag of the core's repository with the Go on PATH, runs the core's tests on it, and prints in
Markdown which tests fail, and which fields of the core's configuration and which lines of its API came and went since
the release that `drivers.install` installs. The status is 1 if a test fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TextIO
from xml.etree import ElementTree

import click

from drivers.install.releases import CORES, SING_BOX_BUILT, Core

# The most lines of one list in a report: a summary on GitHub has an end, and so has the reader's patience.
MOST = 200
_TAG = re.compile(r"\srefs/tags/v(\d+\.\d+\.\d+)$", re.MULTILINE)
_FIELD = re.compile(r"""^[^:]+:([^:]+):.*json:"([^",]+)""", re.MULTILINE)


class Tested(NamedTuple):
    """How a core is built and tested. `configuration`: where its source declares the fields of a configuration.

    `setting`: the variable that names the core to the tests. `chosen`: arguments of pytest for the tests of this core.
    """

    package: str
    configuration: str
    setting: str
    chosen: tuple[str, ...]
    flags: Callable[[str], Sequence[str]]


TESTED: Mapping[str, Tested] = {
    "xray": Tested(
        "./main",
        "infra/conf/*.go",
        "TXNODE_TEST_XRAY_NEW",
        ("--ignore", "tests/drivers", "-k", "not sing_box and not sing-box"),
        lambda _: ("-ldflags", "-s -w"),
    ),
    "sing-box": Tested(
        "./cmd/sing-box",
        "option/*.go",
        "TXNODE_TEST_SING_BOX_NEW",
        ("-k", "sing_box or sing-box"),
        lambda version: (
            *("-tags", ",".join(SING_BOX_BUILT.tags)),
            *("-ldflags", SING_BOX_BUILT.ldflags.replace(SING_BOX_BUILT.version, version)),
        ),
    ),
}


def newest(tags: str) -> str:
    """Return the highest version in the output of `git ls-remote --tags`, without those of previews."""
    versions = _TAG.findall(tags)
    if not versions:
        raise click.ClickException("the core's repository has no tags of releases")
    return str(max(versions, key=lambda version: tuple(map(int, version.split(".")))))


def fields(found: str) -> dict[str, str]:
    """Return the names of fields of JSON, and a file that has each, from the output of `git grep TAG`."""
    return {name: file for file, name in _FIELD.findall(found) if not file.endswith("_test.go") and name != "-"}


def failures(junit: str) -> tuple[int, dict[str, str]]:
    """Return how many tests ran, and by name the last line of the reason of each that failed, from pytest's XML."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    reasons = {}
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                reasons[name] = (found.get("message") or "").strip().split("\n")[0][:MOST]
    return len(cases) - sum(case.find("skipped") is not None for case in cases), reasons


def changed(diff: str) -> list[str]:
    """Return the lines that a diff without context adds and removes, after the name of their file; no comments."""
    lines: list[str] = []
    file = ""
    for line in diff.split("\n"):
        if line.startswith("+++ "):
            file = f"# {line[6:]}"
        elif line[:1] in ("+", "-") and not line.startswith("---"):
            text = line[1:].strip()
            if text and not text.startswith(("//", "option ", "/*", "*")):
                lines += [file, line] if file else [line]
                file = ""
    return lines


def report(
    title: str, ran: int, failed: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str], api: str
) -> str:
    """Put a report together, in Markdown. `before` and `after` are fields of the configuration."""
    added, removed = _without(after, before), _without(before, after)
    lines = changed(api)
    parts = [
        _list(f"{len(failed)} of {ran} tests fail", [f"`{name}`: {reason}" for name, reason in sorted(failed.items())]),
        _list(f"New fields of the configuration: {len(added)}", [f"`{name}` ({file})" for name, file in added.items()]),
        _list(f"Fields that are gone: {len(removed)}", [f"`{name}` ({file})" for name, file in removed.items()]),
        ["", f"### Changed lines of the API: {len(lines)}", "", "```diff", *lines[:MOST], "```", ""],
    ]
    return "\n".join([f"## {title}", *chain.from_iterable(parts)])


def _without(files: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    return {name: files[name] for name in sorted(files.keys() - others.keys())}


def _list(title: str, rows: Sequence[str]) -> list[str]:
    more = [f"- and {len(rows) - MOST} more"] if len(rows) > MOST else []
    return ["", f"### {title}", "", *(f"- {row}" for row in rows[:MOST]), *more]


def _run(*words: str | Path, **more: str) -> str:
    """Run a command and return its stdout; what it writes to stderr is shown."""
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=os.environ | more)
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, words[:4]))} failed: the lines above say why")
    return done.stdout


def _build(source: Path, tested: Tested, version: str, into: Path) -> None:
    """Build the core as `scripts.cores` does, but from its repository: not each tag is a version of a Go module."""
    flags = ("-trimpath", "-buildvcs=false", *tested.flags(version))
    _run("go", "build", "-C", source, *flags, "-o", into, tested.package, CGO_ENABLED="0")


def _tests(executable: Path, tested: Tested, junit: Path, more: Sequence[str]) -> None:
    """Run the tests of a core on this executable. That some fail is in `junit`; its status says nothing more."""
    command = [sys.executable, "-m", "pytest", "-m", "core and not machine and not nightly", *tested.chosen]
    command += ["--hypothesis-profile", "brief", "--junitxml", str(junit), *more]
    subprocess.run(command, stdout=sys.stderr, env=os.environ | {tested.setting: str(executable)}, check=False)
    if not junit.exists():
        raise click.ClickException("pytest did not run: the lines above say why")


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.argument("name", type=click.Choice([*TESTED]))
@click.argument("arguments", metavar="[ARGUMENTS OF PYTEST]...", nargs=-1)
@click.option("--source", help="The core's repository, a URL or a directory. [default: the official one]")
@click.option("--version", help="Test this release. [default: the newest one]")
@click.option("--report", "into", type=click.File("a"), default="-", help="Append the report to this file.")
def main(name: str, arguments: tuple[str, ...], source: str | None, version: str | None, into: TextIO) -> None:
    core, tested = CORES[name][0], TESTED[name]
    origin = source or core.url.removesuffix("/releases/download")
    version = version or newest(_run("git", "ls-remote", "--tags", "--refs", origin, "v*"))
    with TemporaryDirectory() as work:
        clone, executable, junit = (Path(work) / part for part in ("source", name, "junit.xml"))
        _run("git", "clone", "--quiet", "--filter=blob:none", "--branch", f"v{version}", origin, clone)
        _build(clone, tested, version, executable)
        _tests(executable, tested, junit, arguments)
        ran, failed = failures(junit.read_text())
        into.write(_compared(core, version, clone, tested, ran, failed))
    sys.exit(bool(failed) or not ran)


def _compared(core: Core, version: str, clone: Path, tested: Tested, ran: int, failed: Mapping[str, str]) -> str:
    tags = [f"v{each}" for each in (core.version, version)]
    before, after = (
        fields(_run("git", "-C", clone, "grep", 'json:"', tag, "--", tested.configuration)) for tag in tags
    )
    api = _run("git", "-C", clone, "diff", "--unified=0", *tags, "--", "*.proto")
    return report(f"{core.title} {version}, beside {core.version}", ran, failed, before, after, api)


if __name__ == "__main__":
    main()
