"""The file of keys, reloaded without a restart: who has a key of it may call from then on, who had one may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from node.api.auth import Authenticator
from node.keyfile import BadKeys, Key, parse
from node.secret_file import exposed
from node.watching import Files

# Bytes of the file: more than any that has not too many keys.
MAX_FILE = 1024 * 1024


class Keyring(Files):
    """Puts the file's keys into the authenticator.

    `required`: the operator named the file, so it has to be there. `secrets` are other files with keys, to be warned
    about. `gone` is told which keys are none any more.
    """

    def __init__(
        self,
        file: Path,
        required: bool,
        authenticator: Authenticator,
        secrets: Sequence[Path] = (),
    ) -> None:
        super().__init__((file, *secrets), "the keys that were loaded before stay", BadKeys)
        self._file = file
        self._required = required
        self._authenticator = authenticator
        self.gone: Callable[[frozenset[Key]], None] = lambda _: None

    @property
    def warnings(self) -> list[str]:
        """Who else may know a key, or that nobody has one."""
        open_ones = [f"{file} has keys, and everybody may read or write it: chmod 600" for file in self._exposed()]
        nobody = (
            []
            if self._authenticator.keys or self._authenticator.certified
            else ["no key is left: nobody can call the node"]
        )
        return open_ones + nobody

    def make(self) -> None:
        """Raises `BadKeys`."""
        try:
            keys = parse(self._text(), self._authenticator.fixed)
        except BadKeys as error:
            raise BadKeys(f"API_KEYS_FILE {self._file}: {error}") from error
        gone = self._authenticator.replace(keys)
        if gone:
            self.gone(gone)
        self._report(keys)

    def _text(self) -> str:
        try:
            with self._file.open("rb") as file:
                data = file.read(MAX_FILE + 1)
            if len(data) > MAX_FILE:
                raise BadKeys(f"it has over {MAX_FILE} bytes")
            return data.decode()
        except FileNotFoundError as error:
            if not self._required:
                return ""
            raise BadKeys("there is no such file") from error
        except OSError as error:
            raise BadKeys(f"it cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BadKeys(f"it is not a text: byte {error.start}") from error

    def _report(self, keys: Sequence[Key]) -> None:
        if keys:
            said = ", ".join(f"{key.name} ({key.scope.word})" for key in keys)
            self.log.info("keys of {file}: {said}", file=str(self._file), said=said)
        for warning in self.warnings:
            self.log.warn("{warning}", warning=warning)

    def _exposed(self) -> list[Path]:
        return [file for file in self._files if exposed(file)]
