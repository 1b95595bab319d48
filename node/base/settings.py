"""Settings: each room declares its own as fields of a class of `Options`, with text, unit, default and check."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

YES = ("1", "true", "yes", "on", "t", "y")
NO = ("0", "false", "no", "off", "f", "n")

O = TypeVar("O", bound="Options")  # noqa: E741 - a type of options
V = TypeVar("V")


@dataclass(frozen=True)
class Setting:
    """One setting: its name in the environment, its texts, its default. A secret is never a command-line option.

    `text` is one line for `--help`: meaning, unit and range. `details` are full sentences for docs/settings.md: when to
    change it, and what follows. With `choices` the value is one of them, in upper or lower case. `fault` returns why a
    value cannot be used, or "". `read` makes the value of the text; it raises `ValueError` with what is wrong.
    """

    name: str
    text: str
    default: str = ""
    secret: bool = False
    choices: tuple[str, ...] = ()
    fault: Callable[[str], str] | None = None
    details: str = ""
    read: Callable[[str], Any] = str

    @property
    def option(self) -> str:
        """The option of `twistd node`, without the dashes."""
        return self.name.lower().replace("_", "-")


class setting(NamedTuple):  # noqa: N801 - used as a function
    """Declares a field of `Options`: its value is what `read` makes of the text that the operator has set."""

    name: str
    default: str = ""
    read: Callable[[str], Any] = str
    secret: bool = False

    def help(self, text: str, details: str = "") -> Any:
        """Return the field, with the texts of `Setting`."""
        declared = Setting(self.name, text, self.default, self.secret, details=details, read=self.read)
        return field(
            default_factory=lambda: self.read(self.default), metadata={"setting": declared}, repr=not self.secret
        )


@dataclass(frozen=True)
class Options:
    """The settings of one room, as values. A subclass is a frozen dataclass whose fields are made with `setting`."""

    @classmethod
    def declared(cls) -> Iterator[Setting]:
        """The settings of this room."""
        for each in dataclasses.fields(cls):
            if "setting" in each.metadata:
                yield each.metadata["setting"]

    def complete(self, reading: Reading) -> Self:
        """Return the options with what depends on several settings, or on files. Reports faults to `reading`."""
        return self


class Reading:
    """Reads the texts of settings, and collects the faults.

    `values` has the text of every setting, `explicit` the names of those that the operator has set. A relative path
    starts at `directory`.
    """

    def __init__(self, values: Mapping[str, str], explicit: frozenset[str], directory: Path) -> None:
        self.values = values
        self.explicit = explicit
        self._directory = directory
        self.faults: list[str] = []
        # The settings with a fault: a check of several ones does not repeat it.
        self.faulty: set[str] = set()
        self.state_dir = directory

    def options(self, kind: type[O]) -> O:
        """Read the options of one room. A setting with a fault has its default value."""
        found = {}
        for each in dataclasses.fields(kind):
            if "setting" in each.metadata:
                declared: Setting = each.metadata["setting"]
                value = self.value(declared.name, declared.read)
                if declared.name not in self.faulty:
                    found[each.name] = value
        return kind(**found).complete(self)

    def value(self, name: str, read: Callable[[str], V]) -> V | None:
        """Read one setting; None, after a fault, if that fails."""
        try:
            value = read(self.values[name])
            if isinstance(value, Path):
                return (self._directory / value.expanduser()).absolute()
            return value
        except (ValueError, RuntimeError) as error:  # the latter for the home of an unknown user
            self.refuse(name, f"{name}: {error}")
            return None

    def forgive(self, name: str) -> None:
        """Forget the fault of a setting that has no effect."""
        if name in self.faulty:
            self.faulty.remove(name)
            self.faults = [line for line in self.faults if not line.startswith(f"{name}:")]

    def refuse(self, name: str, line: str) -> None:
        """Report that a setting cannot be used, with a line that begins with its name."""
        self.faulty.add(name)
        self.faults.append(line)


# Functions that read the values of settings


def number(least: int, most: int) -> Callable[[str], int]:
    """A whole number in this range."""

    def read(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most:
            return int(text)
        raise ValueError(f"{text!r} is not a number from {least} to {most}")

    return read


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Seconds in this range, with a fraction if need be."""

    def read(text: str) -> float:
        if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) and least <= float(text) <= most:
            return float(text)
        raise ValueError(f"{text!r} is not a number of seconds from {least:g} to {most:g}")

    return read


def word(*choices: str) -> Callable[[str], str]:
    """One of these words, in lower case."""

    def read(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(filter(None, choices))}")
        return text.lower()

    return read


def chosen(yes: str, no: str) -> Callable[[str], bool]:
    """Whether the value is the first of two words."""
    read = word(yes, no)
    return lambda text: read(text) == yes


def switch(text: str) -> bool:
    """On or off, in any spelling that deployed nodes accept."""
    return word(*YES, *NO)(text) in YES


def path(text: str) -> Path | None:
    """A path; None if the setting is empty."""
    return Path(text) if text else None


def port(text: str) -> int | None:
    """A TCP port; None if the setting is empty."""
    return number(1, 65535)(text) if text else None


def host_name(text: str) -> str:
    """A host name, in lower case."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text.lower()) or re.fullmatch(r"[0-9.]+", text):
        raise ValueError(f"{text!r} is not a host name")
    return text.lower()


def host_port(text: str) -> tuple[str, int] | None:
    """HOST:PORT, an IPv6 address in brackets; None if the setting is empty."""
    if not text:
        return None
    found = re.fullmatch(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]+)", text)
    if found is None:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return found[1].strip("[]"), number(1, 65535)(found[2])


def names(text: str) -> tuple[str, ...]:
    """Names that are separated by commas or spaces."""
    return tuple(re.findall(r"[^,\s]+", text))


def address(text: str) -> str:
    """A base URL for downloads, or ""."""
    if text and (fault := fault_of_address(text)):
        raise ValueError(fault)
    return text


def fault_of_address(text: str) -> str:
    """Why this is no usable base URL; empty if it is. Does not repeat the URL: it may contain a password."""
    if not re.fullmatch(r"https?://[^\s/]\S*", text):
        return "it does not begin with https:// or http:// and a host"
    if "@" in text.split("/")[2]:
        return "it contains a user name or password, which jobs and logs would show: remove it"
    return ""


def is_file(path: Path) -> bool:
    """Whether there is such a file."""
    try:
        return path.is_file()
    except OSError:  # too long a name
        return False
