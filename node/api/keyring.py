"""The key file, reloaded without a restart: new keys are valid at once, and calls with removed ones end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from node.api.auth import Authenticator
from node.base.file_watch import Files
from node.base.secret_file import exposed
from node.keys.keyfile import BadKeys, Key, parse
from node.keys.options import KeyOptions

# Bytes of the file: more than `MAX_KEYS` keys need.
MAX_FILE = 1024 * 1024


class Keyring(Files):
    """Loads the keys of the key file into the authenticator.

    It checks the permissions of all files with keys. `gone` is called with the keys that are no longer valid.
    """

    def __init__(
        self,
        options: KeyOptions,
        authenticator: Authenticator,
        reloaded: Callable[[str], None] = lambda _: None,
        gone: Callable[[frozenset[Key]], None] = lambda _: None,
    ) -> None:
        files = filter(None, (options.file, options.key_file))
        super().__init__(files, "the previous API keys stay in use", BadKeys, reloaded)
        self._file = options.file
        self._required = options.required
        self._authenticator = authenticator
        self._gone = gone

    @property
    def warnings(self) -> list[str]:
        return [*super().warnings, *self._risks()]

    def _risks(self) -> list[str]:
        """Key files that others can read, and whether there is no key at all."""
        risk = "holds keys, and every user of the machine can read or write it: chmod 600"
        risks = [f"{file} {risk}" for file in self._files if exposed(file)]
        if not (self._authenticator.keys or self._authenticator.certified):
            risks.append("no API key is left: no controller can call the node")
        return risks

    def make(self) -> None:
        """Read the file and replace the keys. Raises `BadKeys`."""
        try:
            keys = parse(self._text(), self._authenticator.fixed)
        except BadKeys as error:
            raise BadKeys(f"API_KEYS_FILE {self._file}: {error}") from error
        gone = self._authenticator.replace(keys)
        if gone:
            self._gone(gone)
        self._report(keys)

    def _text(self) -> str:
        try:
            with self._file.open("rb") as file:
                data = file.read(MAX_FILE + 1)
            if len(data) > MAX_FILE:
                raise BadKeys(f"larger than {MAX_FILE} bytes")
            return data.decode()
        except FileNotFoundError as error:
            if not self._required:
                return ""
            raise BadKeys("no such file") from error
        except OSError as error:
            raise BadKeys(f"cannot read it: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise BadKeys(f"not UTF-8 text: byte {error.start}") from error

    def _report(self, keys: Sequence[Key]) -> None:
        if keys:
            names = ", ".join(f"{key.name} ({key.scope.word})" for key in keys)
            self.log.info("loaded API keys from {file}: {names}", file=str(self._file), names=names)
        for warning in self._risks():
            self.log.warn("{warning}", warning=warning)
