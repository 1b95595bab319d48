"""What docs/stability.md promises to keep is as in `stable.txt`: a line that changes or goes needs a major release.

After an addition: `python -m tests.house.test_stable` writes the file again, without losing a line.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import click
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

import node.client
from node.api.methods import METHODS, SERVICE
from node.base import errors
from node.base.aio import Aio
from node.base.errors import KINDS
from node.client import Target
from node.command_line import SETTINGS
from node.events.kinds import Kind
from node.metrics.families import FAMILIES
from node.nodectl.app import main as nodectl
from node.nodectl.output import Exit
from node.state.schema import STEPS
from protos import service_pb2

FILE = Path(__file__).with_name("stable.txt")
# The modules that scripts of operators run.
PROGRAMS = (
    "node.ready",
    "node.certificate",
    "node.keys.__main__",
    "drivers.install.__main__",
    "drivers.install.update",
)
# Names of the types in `FieldDescriptor`, by number.
TYPES = {value: name[5:].lower() for name, value in vars(FieldDescriptor).items() if name.startswith("TYPE_")}


def surface() -> Iterator[str]:
    """A line for each thing that the promise covers."""
    yield from _wire()
    yield from (f"error {kind.code} {kind.http} {kind.grpc}" for kind in KINDS)
    yield from (f"event {kind.value[0]} {kind.value[1]}" for kind in Kind)
    yield from (f"metric {each.name} {each.kind.value} {','.join(sorted(each.labels))}".rstrip() for each in FAMILIES)
    for setting in SETTINGS:
        yield from (f"setting {setting.name} {choice}".rstrip() for choice in ("", *setting.choices))
    yield from (f"state step {number} {sha256(step.encode()).hexdigest()[:16]}" for number, step in enumerate(STEPS, 1))
    yield from (f"exit nodectl {code.name} {code.value}" for code in Exit)
    for module in filter(find_spec, PROGRAMS):
        yield from _program(f"python -m {module.removesuffix('.__main__')}")
    yield from _commands("nodectl", nodectl, click.Context(nodectl))
    for name in node.client.__all__:
        yield f"client {name}"
        member = getattr(node.client, name)
        if inspect.isfunction(member):
            yield from _parameters(name, member, 0)
        elif inspect.isclass(member) and not issubclass(member, Exception):
            yield from _signatures(member)
    yield from _parameters("Target", Target.__init__, 1)
    for name, member in inspect.getmembers(errors, inspect.isclass):
        if issubclass(member, errors.NodeError):
            yield f"client errors.{name}"
    yield from (f"client Aio.{each.__name__}" for each in (Aio.start, Aio.stop))


def _wire() -> Iterator[str]:
    for method in METHODS:
        for verb in method.verbs:
            yield f"call {method.name} {verb} {method.path} {method.kind.name.lower()} scope {method.scope.word}"
        wire = SERVICE.methods_by_name[method.name]
        streams = "".join(("s" if wire.client_streaming else "-", "s" if wire.server_streaming else "-"))
        yield f"rpc {SERVICE.full_name}.{wire.name} {wire.input_type.name} {wire.output_type.name} {streams}"
    for message in service_pb2.DESCRIPTOR.message_types_by_name.values():
        yield from _fields(message)
    for enum in service_pb2.DESCRIPTOR.enum_types_by_name.values():
        yield from _values(enum)


def _fields(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        words = (kind.full_name if kind else TYPES[field.type], *(["repeated"] if field.is_repeated else []))
        yield f"field {message.full_name}.{field.name} {field.number} {' '.join(words)}"
    for nested in message.nested_types:
        yield from _fields(nested)
    for enum in message.enum_types:
        yield from _values(enum)


def _values(enum: EnumDescriptor) -> Iterator[str]:
    yield from (f"value {enum.full_name}.{value.name} {value.number}" for value in enum.values)


def _commands(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        for spelled in (*parameter.opts, *parameter.secondary_opts):
            yield f"command {name} {spelled if isinstance(parameter, click.Option) else spelled.upper()}"
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            assert found is not None
            yield f"command {name} {word}"
            yield from _commands(f"{name} {word}", found, click.Context(found, parent=context))


def _program(command: str) -> Iterator[str]:
    """The options and commands of a program, from its help, if it has one."""
    yield f"program {command}"
    asked = [sys.executable, *command.split()[1:], "--help"]
    plain = os.environ | {"PYTHON_COLORS": "0"}
    shown = subprocess.run(asked, env=plain, capture_output=True, text=True, check=False).stdout
    words = re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown)
    words += [word for words in re.findall(r"\{([\w,-]+)\}", shown) for word in words.split(",")]
    yield from (f"program {command} {word}" for word in sorted(set(words)))


def _signatures(kind: type) -> Iterator[str]:
    """The public methods of a class, and their parameters."""
    for name, member in inspect.getmembers(kind, inspect.isfunction):
        if name[0] != "_":
            yield f"client {kind.__name__}.{name}"
            yield from _parameters(f"{kind.__name__}.{name}", member, 1)


def _parameters(name: str, member: Callable[..., object], skipped: int) -> Iterator[str]:
    """The parameters behind `self`: those that have a default in brackets."""
    for each in list(inspect.signature(member).parameters.values())[skipped:]:
        yield f"client {name} {each.name if each.default is each.empty else f'[{each.name}]'}"


def test_nothing_changed_or_went() -> None:
    promised, now = FILE.read_text().splitlines(), set(surface())
    assert [line for line in promised if line not in now] == []


def test_additions_are_promised_too() -> None:
    promised = set(FILE.read_text().splitlines())
    added = [line for line in surface() if line not in promised]
    assert added == [], "add them with `python -m tests.house.test_stable`"


def main() -> None:
    """Add lines for what is new; refuse if something that was promised changed or is gone."""
    promised = FILE.read_text().splitlines() if FILE.exists() else []
    now = list(dict.fromkeys(surface()))
    lost = [line for line in promised if line not in now]
    if lost:
        sys.exit("\n".join(["docs/stability.md promises these, so they need a major release:", *lost]))
    FILE.write_text("".join(f"{line}\n" for line in now))


if __name__ == "__main__":
    main()
