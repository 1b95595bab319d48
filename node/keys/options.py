"""The settings of API keys."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from node.base.settings import Options, Reading, chosen, is_file, path, setting

MIN_KEY = 16
# The name of API_KEY in logs and events.
DEFAULT_KEY = "default"
# The file of named keys in STATE_DIR.
KEYS = "api_keys"


@dataclass(frozen=True)
class KeyOptions(Options):
    """The keys of callers. `required`: the operator has set API_KEYS_FILE, so the file must exist."""

    key: str = setting("API_KEY", secret=True).help(
        "key that controllers must present: a UUID, or at least 16 characters",
        "Takes effect at the next start; keys of API_KEYS_FILE change without one. See [Keys](#keys).",
    )
    key_file: Path | None = setting("API_KEY_FILE", read=path).help(
        "file that holds the key, used if API_KEY is not set (default: api_key in STATE_DIR, if that file exists)",
        "Set it to keep the key out of the environment. Read at the start only.",
    )
    file: Path = setting("API_KEYS_FILE", read=path).help(
        "file of further keys, each with a name and a scope; reloaded when it changes (default: api_keys in STATE_DIR, "
        "if that file exists)",
        "Use it for several controllers, for keys that may only read, and to change a key without a restart. "
        "See [More keys](#more-keys).",
    )
    certified: bool = setting("CLIENT_CERTIFICATE", "beside", chosen("instead", "beside")).help(
        "with CLIENT_CA: beside (a client needs a certificate and a key), or instead (a certificate is enough, and has "
        "scope all)",
        "Set `instead` for controllers that have a certificate and no key.",
    )
    required: bool = False

    def complete(self, reading: Reading) -> Self:
        """Read the key from its file, and check it. It may be empty if client certificates or named keys replace it."""
        file = self.file or reading.state_dir / KEYS
        found = replace(self, file=file, required=bool(self.file), key_file=None)
        key_file = self.key_file or reading.state_dir / "api_key"
        if not self.key and (self.key_file or is_file(key_file)):
            return found._from_file(key_file, reading)
        other_ways = found.required or self.certified or is_file(file)
        if (self.key or not other_ways) and (fault := key_fault(self.key)):
            reading.refuse("API_KEY", f"API_KEY: {fault}")
        return found

    def _from_file(self, file: Path, reading: Reading) -> Self:
        try:
            key = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reading.refuse("API_KEY_FILE", f"API_KEY_FILE: {file} cannot be read: {error}")
            key = ""
        else:
            if fault := key_fault(key):
                reading.refuse("API_KEY_FILE", f"API_KEY_FILE {file}: {fault}")
        return replace(self, key=key, key_file=file)


def key_fault(key: str) -> str:
    """Return why this key cannot be used, or ""."""
    if not key:
        return "there is no key: make one with `nodectl key new panel`, or set one, such as a UUID"
    if len(key) < MIN_KEY:
        return f"the key has fewer than {MIN_KEY} characters"
    try:
        return "the key is the nil UUID: use a random one" if uuid.UUID(key).int == 0 else ""
    except ValueError:
        return ""
