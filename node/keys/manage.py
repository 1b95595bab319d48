"""Make, list and revoke API keys: `python -m node.keys new|list|revoke`. A running node reloads the key file."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from node.base.secret_file import write_secret
from node.keys.keyfile import SCOPES, BadKeys, Key, digest_of, line_of, parse, parse_line, require_name
from node.keys.options import DEFAULT_KEY
from node.settings import BadSettings, given, keys_file

_DESCRIPTION = "Make, list and revoke keys of controllers. A running node loads changes within ten seconds."


def new(file: Path, name: str, scope: str) -> str:
    """Add a key with this name, and return it: the file has only its digest. Raises `BadKeys`, `OSError`."""
    require_name(name)
    if name == DEFAULT_KEY:
        raise BadKeys(f"{DEFAULT_KEY} is the name of API_KEY: choose another one")
    made = str(uuid.uuid4())
    with _locked(file):
        lines = _lines(file)
        lines.append(line_of(Key(name, SCOPES[scope], digest_of(made))))
        _write(file, lines)
    return made


def revoke(file: Path, name: str) -> None:
    """Remove the key with this name. Raises `BadKeys`, also if the file has no such key, and `OSError`."""
    with _locked(file):
        lines = _lines(file)
        kept = [line for line in lines if (key := parse_line(line)) is None or key.name != name]
        if kept == lines:
            raise BadKeys(f"{file} has no key {name}: `list` prints the names")
        _write(file, kept)


def keys(file: Path) -> tuple[Key, ...]:
    """Return the keys of the file. Raises `BadKeys`, `OSError`."""
    return parse("\n".join(_lines(file)))


def _lines(file: Path) -> list[str]:
    """Return the file's lines with its comments, and check them. Raises `BadKeys`."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise BadKeys(f"{file} is not UTF-8 text: {error}") from error
    parse(text)
    return text.rstrip("\n").split("\n") if text.strip() else []


def _write(file: Path, lines: Sequence[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    parse(text)
    write_secret(file, text.encode())


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let one process at a time change the file. It is replaced, so the lock is on its directory."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m node.keys", description=_DESCRIPTION)
    parser.add_argument("--file", type=Path, help="the file (default: API_KEYS_FILE, or api_keys in STATE_DIR)")
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("new", help="make a key and print it, once: the file has only its digest")
    adding.add_argument("name", metavar="NAME", help="how logs and events name its holder")
    adding.add_argument("--scope", choices=SCOPES, default="all", help="what the key allows (default: all)")
    commands.add_parser("list", help="print the names and scopes of all keys")
    commands.add_parser("revoke", help="remove a key; its open streams end").add_argument("name", metavar="NAME")
    return parser


def _do(options: argparse.Namespace) -> str:
    """Run the command, and return what to print."""
    file = options.file or keys_file(given({}, Path.cwd()), Path.cwd())
    if options.command == "new":
        return f"{new(file, options.name, options.scope)}\n"
    if options.command == "revoke":
        revoke(file, options.name)
        return ""
    return "".join(f"{key.name} {key.scope.word}\n" for key in keys(file))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. On standard output it prints the key, or the list, and nothing else."""
    parser = _parser()
    try:
        output = _do(parser.parse_args(arguments))
    except (OSError, BadKeys, BadSettings) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    sys.stdout.write(output)
    return 0
